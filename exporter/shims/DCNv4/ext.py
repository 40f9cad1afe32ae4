"""The extension: deformable convolution without a norm of its weights, and deformable attention.

Xiong et al., "Efficient deformable ConvNets: Rethinking dynamic and sparse operator for vision
applications", 2024.
"""

from typing import Any

import torch
from torch import Tensor

from fuseport.exporter.shims._dcn import dcnv3_forward
from fuseport.exporter.shims._gradients import differentiated
from fuseport.ops.ms_deform_attn import ms_deform_attn

__all__ = [
    "dcnv4_backward",
    "dcnv4_forward",
    "flash_deform_attn_backward",
    "flash_deform_attn_forward",
]


def dcnv4_forward(
    value: Tensor,
    p_offset: Tensor,
    kernel_h: int,
    kernel_w: int,
    stride_h: int,
    stride_w: int,
    pad_h: int,
    pad_w: int,
    dilation_h: int,
    dilation_w: int,
    group: int,
    group_channels: int,
    offset_scale: float,
    im2col_step: int,
    remove_center: int,
    d_stride: int,
    block_thread: int,
    softmax: bool,
) -> Tensor:
    """Sum bilinear samples of each group of channels, weighted by its mask; G groups, P taps.

    Args:
        value: (b, H, W, G·c).
        p_offset: (b, oh, ow, at least G·P·3): of each group dx and dy of its taps in turn, and then
            their mask; what is behind those of all groups is not looked at.
        softmax: whether the mask of a group is its softmax.
        im2col_step, d_stride, block_thread: how kernels are launched; nothing depends on them.

    The others are those of `_dcn.dcnv3_forward`.

    Returns:
        (b, oh, ow, G·c).

    Raises:
        ValueError: p_offset is not of as many rows or columns as there are outputs.
    """
    _, height, width, _ = value.shape
    rows = (height + 2 * pad_h - dilation_h * (kernel_h - 1) - 1) // stride_h + 1
    columns = (width + 2 * pad_w - dilation_w * (kernel_w - 1) - 1) // stride_w + 1
    batch, *given, _ = p_offset.shape
    if given != [rows, columns]:
        raise ValueError(
            f"DCNv4: offsets are of {given[0]} × {given[1]} outputs where there are "
            f"{rows} × {columns}"
        )
    taps = kernel_h * kernel_w - int(bool(remove_center))
    parts = p_offset[..., : group * taps * 3].reshape(batch, rows, columns, group, taps * 3)
    offset, mask = parts.split([taps * 2, taps], -1)
    return dcnv3_forward(
        value,
        offset.flatten(3),
        _weights(mask, softmax).flatten(3),
        kernel_h,
        kernel_w,
        stride_h,
        stride_w,
        pad_h,
        pad_w,
        dilation_h,
        dilation_w,
        group,
        group_channels,
        offset_scale,
        im2col_step,
        remove_center,
    )


def dcnv4_backward(
    value: Tensor,
    p_offset: Tensor,
    kernel_h: int,
    kernel_w: int,
    stride_h: int,
    stride_w: int,
    pad_h: int,
    pad_w: int,
    dilation_h: int,
    dilation_w: int,
    group: int,
    group_channels: int,
    offset_scale: float,
    im2col_step: int,
    grad_output: Tensor,
    remove_center: int,
    d_stride: int,
    block_thread: int,
    softmax: bool,
) -> list[Any]:
    """The gradients of value and p_offset, by that of the outputs."""
    window = (kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w)
    groups = (group, group_channels, offset_scale, im2col_step, remove_center)

    def forward(value: Any, p_offset: Any) -> Tensor:
        return dcnv4_forward(value, p_offset, *window, *groups, d_stride, block_thread, softmax)

    return differentiated(forward, (value, p_offset), grad_output)


def flash_deform_attn_forward(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    sampling_loc_attn: Tensor,
    im2col_step: int,
    K: int,  # the extension's name
    d_stride: int,
    block_thread: int,
) -> Tensor:
    """Deformable attention whose weights are the softmax of logits; L levels, K points of each.

    Args:
        value: (b, pixels of all levels, G, c).
        spatial_shapes: (L, 2), height and width.
        level_start_index: (L,).
        sampling_loc_attn: (b, q, G, L·K·3): x and y in turn, from 0 to 1, and then the logits.
        K: points of a level.
        im2col_step, d_stride, block_thread: as for `dcnv4_forward`.

    Returns:
        (b, q, G·c).
    """
    batch, queries, group, _ = sampling_loc_attn.shape
    points = spatial_shapes.shape[0] * K
    places, logits = sampling_loc_attn.split([points * 2, points], -1)
    shape = (batch, queries, group, spatial_shapes.shape[0], K)
    wide = torch.promote_types(sampling_loc_attn.dtype, torch.float32)
    return ms_deform_attn(
        value,
        spatial_shapes,
        level_start_index,
        places.to(wide).reshape(*shape, 2),
        _weights(logits, softmax=True).reshape(shape),
    )


def flash_deform_attn_backward(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    sampling_loc_attn: Tensor,
    grad_output: Tensor,
    im2col_step: int,
    K: int,  # the extension's name
    d_stride: int,
    block_thread: int,
) -> list[Any]:
    """The gradients of value and sampling_loc_attn, by that of the outputs."""
    levels, launch = (spatial_shapes, level_start_index), (im2col_step, K, d_stride, block_thread)

    def forward(value: Any, sampling_loc_attn: Any) -> Tensor:
        return flash_deform_attn_forward(value, *levels, sampling_loc_attn, *launch)

    return differentiated(forward, (value, sampling_loc_attn), grad_output)


def _weights(logits: Tensor, softmax: bool) -> Tensor:
    """In float32 at least, as the kernels have them."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide.softmax(-1) if softmax else wide
