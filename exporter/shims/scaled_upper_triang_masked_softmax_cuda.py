"""Stands in for `scaled_upper_triang_masked_softmax_cuda`, an extension of apex and Megatron-LM."""

from torch import Tensor

from fuseport.exporter.shims import _softmax

__all__ = ["backward", "forward"]


def forward(input: Tensor, scale_factor: float) -> Tensor:
    """softmax(scale_factor · input) of (b, l, l), each row up to the diagonal; zero behind it."""
    return _softmax.causal(input, scale_factor)


def backward(output_grads: Tensor, softmax_results: Tensor, scale_factor: float) -> Tensor:
    """The gradient of input, by that of the result, which the extension writes over."""
    return _softmax.gradient(output_grads, softmax_results, scale_factor)
