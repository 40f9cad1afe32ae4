"""Stands in for `spatial_correlation_sampler_backend`, the extension that the package of that name
calls."""

from typing import Any

from torch import Tensor

from fuseport.exporter.shims import _correlation
from fuseport.exporter.shims._gradients import differentiated

__all__ = ["backward", "forward"]

forward = _correlation.sampler


def backward(
    input1: Tensor, input2: Tensor, grad_output: Tensor, *sizes: Any, **named: Any
) -> list[Tensor]:
    """The gradients of both inputs, by that of the outputs; sizes are those of `forward`."""

    def of_both(one: Tensor, two: Tensor) -> Tensor:
        return _correlation.sampler(one, two, *sizes, **named)

    return differentiated(of_both, [input1, input2], grad_output)
