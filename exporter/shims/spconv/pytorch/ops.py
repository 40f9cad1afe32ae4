"""Sizes of outputs. Functions of the extension may be imported, not called."""

from collections.abc import Sequence
from typing import Any

from fuseport.exporter.shims._placeholder import refusing

from ..core import AlgoHint, ConvAlgo

__all__ = ["AlgoHint", "ConvAlgo", "get_conv_output_size", "get_deconv_output_size"]


def get_conv_output_size(
    input_size: Sequence[Any],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> list[Any]:
    """Of a convolution, in each dimension; 1 where the kernel is all there is, -1."""
    sizes = zip(input_size, kernel_size, stride, padding, dilation, strict=True)
    return [
        1 if kernel == -1 else (size + 2 * pad - spread * (kernel - 1) - 1) // step + 1
        for size, kernel, step, pad, spread in sizes
    ]


def get_deconv_output_size(
    input_size: Sequence[Any],
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int],
) -> list[Any]:
    """Of a transposed one, which there does not count its dilation.

    Raises:
        ValueError: a kernel is -1.
    """
    if min(kernel_size) < 0:
        raise ValueError("deconv don't support kernel_size < 0")
    sizes = zip(input_size, kernel_size, stride, padding, output_padding, strict=True)
    return [(size - 1) * step - 2 * pad + kernel + over for size, kernel, step, pad, over in sizes]


def __getattr__(name: str) -> Any:
    return refusing(
        __name__,
        name,
        f"spconv.pytorch.ops.{name} was called, of which fuseport's stand-in has no form: use "
        "spconv's layers",
    )
