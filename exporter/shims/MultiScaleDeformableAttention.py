"""Stands in for `MultiScaleDeformableAttention`, the extension of Deformable DETR and its heirs."""

import torch
from torch import Tensor

from fuseport.ops import registration
from fuseport.ops.ms_deform_attn import SPEC, ms_deform_attn

__all__ = ["ms_deform_attn_backward", "ms_deform_attn_forward"]


def ms_deform_attn_forward(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    sampling_loc: Tensor,
    attn_weight: Tensor,
    im2col_step: int,
) -> Tensor:
    """The outputs, (b, q, h·c); arguments are those of `fuseport.ops.ms_deform_attn`."""
    return ms_deform_attn(value, spatial_shapes, level_start_index, sampling_loc, attn_weight)


def ms_deform_attn_backward(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    sampling_loc: Tensor,
    attn_weight: Tensor,
    grad_output: Tensor,
    im2col_step: int,
) -> list[Tensor]:
    """The gradients of value, sampling_loc and attn_weight, by that of the outputs."""
    registration.ensure(SPEC)
    return [
        *torch.ops.fuseport.ms_deform_attn_backward(
            grad_output, value, spatial_shapes, level_start_index, sampling_loc, attn_weight
        )
    ]
