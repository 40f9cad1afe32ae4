"""The calls of extensions for deformable convolution, over the registered op."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fuseport.ops import registration
from fuseport.ops.deform_conv2d import SPEC, deform_conv2d

__all__ = ["Options", "conv", "gradients"]

Options = tuple[int, int, int, int, int, int]
"""Strides, paddings and dilations, for rows and columns each."""


def conv(
    input: Tensor,
    offset: Tensor,
    mask: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    options: Options,
    groups: Sequence[int],
) -> Tensor:
    """(b, o, oh, ow); arguments are those of `fuseport.ops.deform_conv2d`.

    Args:
        input: (b, c, H, W).
        offset: (b, 2·G·kh·kw, oh, ow).
        mask: (b, G·kh·kw, oh, ow), or None.
        weight: (o, c/g, kh, kw).
        bias: (o,), or None.
        options: see `Options`.
        groups: g and G, which extensions are told beside the shapes that they follow from.

    Raises:
        ValueError: they do not follow, or as `fuseport.ops.deform_conv2d`.
    """
    _check(input, offset, weight, groups)
    stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w = options
    return deform_conv2d(
        input,
        offset,
        weight,
        bias,
        (stride_h, stride_w),
        (pad_h, pad_w),
        (dilation_h, dilation_w),
        mask,
    )


def gradients(
    dout: Tensor,
    input: Tensor,
    offset: Tensor,
    mask: Tensor | None,
    weight: Tensor,
    options: Options,
    groups: Sequence[int],
) -> list[Tensor]:
    """Those of input, offset, mask if there is one, weight and bias, by that of the outputs.

    Raises:
        ValueError: as `conv`.
    """
    _check(input, offset, weight, groups)
    registration.ensure(SPEC)
    bias = weight.new_zeros(weight.shape[:1])
    ops = torch.ops.fuseport
    if mask is None:
        return [*ops.deform_conv2d_backward(dout, input, offset, weight, bias, *options)]
    given = (dout, input, offset, mask, weight, bias)
    return [*ops.deform_conv2d_modulated_backward(*given, *options)]


def _check(input: Tensor, offset: Tensor, weight: Tensor, groups: Sequence[int]) -> None:
    group, deformable_group = groups
    if input.shape[1] != group * weight.shape[1]:
        raise ValueError(
            f"deform_conv2d: {group} groups of {weight.shape[1]} channels, as weight has them, are "
            f"not the {input.shape[1]} channels of input"
        )
    wanted = 2 * deformable_group * weight.shape[2] * weight.shape[3]
    if offset.shape[1] != wanted:
        raise ValueError(
            f"deform_conv2d: {deformable_group} offset groups and a filter of "
            f"{weight.shape[2]}×{weight.shape[3]} want {wanted} channels of offset, not "
            f"{offset.shape[1]}"
        )
