"""Stands in for `mmcv._ext`, the extension of mmcv, of which mmcv-lite is all the rest.

`mmcv.ops` asks for all functions that it may call when it is imported, others from one version to
the next: any name is there, and what has no form here says so when it is called.
"""

from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor

from fuseport.exporter.shims import _correlation
from fuseport.exporter.shims._extensions.deform_conv_ext import (
    deform_conv_backward_input,
    deform_conv_backward_parameters,
    deform_conv_forward,
    modulated_deform_conv_backward,
    modulated_deform_conv_forward,
)
from fuseport.exporter.shims._gradients import differentiated
from fuseport.exporter.shims._placeholder import refusing
from fuseport.exporter.shims.MultiScaleDeformableAttention import (
    ms_deform_attn_backward as _ms_deform_attn_gradients,
)
from fuseport.exporter.shims.MultiScaleDeformableAttention import ms_deform_attn_forward as _forward

__all__ = [
    "correlation_backward",
    "correlation_forward",
    "deform_conv_backward_input",
    "deform_conv_backward_parameters",
    "deform_conv_forward",
    "modulated_deform_conv_backward",
    "modulated_deform_conv_forward",
    "ms_deform_attn_backward",
    "ms_deform_attn_forward",
]


def correlation_forward(input1: Tensor, input2: Tensor, output: Tensor, **options: Any) -> None:
    """Writes (b, ph, pw, oh, ow) to `output`; options are those of `_correlation.sampler`."""
    output.copy_(_correlation.sampler(input1, input2, **options))


def correlation_backward(
    grad_output: Tensor,
    input1: Tensor,
    input2: Tensor,
    grad_input1: Tensor,
    grad_input2: Tensor,
    **options: Any,
) -> None:
    """Adds to the gradients of both inputs, by that of the output."""

    def sampler(input1: Tensor, input2: Tensor) -> Tensor:
        return _correlation.sampler(input1, input2, **options)

    found = differentiated(sampler, (input1, input2), grad_output)
    grad_input1.add_(found[0])
    grad_input2.add_(found[1])


def ms_deform_attn_forward(
    value: Tensor,
    value_spatial_shapes: Tensor,
    value_level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    im2col_step: int,
) -> Tensor:
    """The outputs, (b, q, h·c); arguments are those of `fuseport.ops.ms_deform_attn`."""
    return _forward(
        value,
        value_spatial_shapes,
        value_level_start_index,
        sampling_locations,
        attention_weights,
        im2col_step,
    )


def ms_deform_attn_backward(
    value: Tensor,
    value_spatial_shapes: Tensor,
    value_level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    grad_output: Tensor,
    grad_value: Tensor,
    grad_sampling_loc: Tensor,
    grad_attn_weight: Tensor,
    im2col_step: int,
) -> None:
    """Adds to the gradient of value, and writes those of sampling_locations and weights."""
    dvalue, dlocations, dweights = _ms_deform_attn_gradients(
        value,
        value_spatial_shapes,
        value_level_start_index,
        sampling_locations,
        attention_weights,
        grad_output,
        im2col_step,
    )
    grad_value.add_(dvalue)
    grad_sampling_loc.copy_(dlocations)
    grad_attn_weight.copy_(dweights)


def __getattr__(name: str) -> Callable[..., NoReturn]:
    reason = (
        f"mmcv._ext.{name} was called, of which fuseport's stand-in for mmcv._ext has no form: "
        "compute it by functions of torch, or make it an op of your own (README, Ops of your "
        "own)"
    )
    return refusing("module 'mmcv._ext'", name, reason)
