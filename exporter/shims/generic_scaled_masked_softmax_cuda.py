"""Stands in for `generic_scaled_masked_softmax_cuda`, an extension of apex for any length."""

from torch import Tensor

from fuseport.exporter.shims import _softmax

__all__ = ["backward", "forward"]


def forward(input: Tensor, mask: Tensor, scale_factor: float) -> Tensor:
    """softmax(scale_factor · input) without what mask hides; see `_softmax.masked`, clamped."""
    return _softmax.masked(input, mask, scale_factor, clamped=True)


def backward(output_grads: Tensor, softmax_results: Tensor, scale_factor: float) -> Tensor:
    """The gradient of input, by that of the result."""
    return _softmax.gradient(output_grads, softmax_results, scale_factor)
