"""Stands in for `dynamicconv_cuda`, fairseq's extension for dynamic convolutions."""

from torch import Tensor

from fuseport.exporter.shims import _light
from fuseport.exporter.shims._gradients import differentiated

__all__ = ["backward", "forward"]


def forward(input: Tensor, filters: Tensor, padding_l: int) -> list[Tensor]:
    """One tensor, like input, (b, C, t), by filters, (b, H, K, t); see `_light.dynamic`."""
    return [_light.dynamic(input, filters, padding_l)]


def backward(gradOutput: Tensor, padding_l: int, input: Tensor, filters: Tensor) -> list[Tensor]:
    """The gradients of input and filters."""
    return differentiated(
        lambda x, f: _light.dynamic(x, f, padding_l), [input, filters], gradOutput
    )
