"""Stands in for `lightconv_cuda`, fairseq's extension for lightweight convolutions."""

from torch import Tensor

from fuseport.exporter.shims import _light
from fuseport.exporter.shims._gradients import differentiated

__all__ = ["backward", "forward"]


def forward(input: Tensor, filters: Tensor, padding_l: int) -> list[Tensor]:
    """One tensor, (b, C, t), of input, (b, C, t), and filters, (H, K); see `_light.lightweight`."""
    return [_light.lightweight(input, filters, padding_l)]


def backward(gradOutput: Tensor, padding_l: int, input: Tensor, filters: Tensor) -> list[Tensor]:
    """The gradients of input and filters."""
    return differentiated(
        lambda x, f: _light.lightweight(x, f, padding_l), [input, filters], gradOutput
    )
