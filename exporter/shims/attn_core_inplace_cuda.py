"""Stands in for `attn_core_inplace_cuda`, the extension of OpenFold."""

from torch import Tensor

from fuseport.exporter.shims import _softmax

__all__ = ["backward_", "forward_"]

# The numbers of rows and columns are those of the tensors: code gives what they have.


def forward_(input: Tensor, rows: int, cols: int) -> None:
    """Writes softmax(input), over the last dimension, to input, (…, q, k)."""
    input.copy_(_softmax.scaled(input, 1.0))


def backward_(
    output: Tensor, d_ov: Tensor, values: Tensor, rows: int, cols_output: int, cols_values: int
) -> None:
    """Writes the gradient of the scores to output, (…, q, k), the weights of values.

    Args:
        output: what `forward_` has written.
        d_ov: (…, q, c), the gradient of output · values.
        values: (…, k, c). The extension's own kernel takes those of another row of the batch
            where q is not k.
    """
    output.copy_(_softmax.gradient(d_ov @ values.mT, output))
