"""Stands in for `_ext`, the extension of DCNv2, as CenterNet, FairMOT and others have it."""

from torch import Tensor

from fuseport.exporter.shims._deform import conv, gradients
from fuseport.exporter.shims._psroi import psroi_pooling, psroi_pooling_gradients

__all__ = [
    "dcn_v2_backward",
    "dcn_v2_forward",
    "dcn_v2_psroi_pooling_backward",
    "dcn_v2_psroi_pooling_forward",
]


def dcn_v2_forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    offset: Tensor,
    mask: Tensor,
    kernel_h: int,
    kernel_w: int,
    stride_h: int,
    stride_w: int,
    pad_h: int,
    pad_w: int,
    dilation_h: int,
    dilation_w: int,
    deformable_group: int,
) -> Tensor:
    """The outputs, (b, o, oh, ow); tensors are those of `fuseport.ops.deform_conv2d`."""
    options = (stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w)
    return conv(input, offset, mask, weight, bias, options, (1, deformable_group))


def dcn_v2_backward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    offset: Tensor,
    mask: Tensor,
    grad_output: Tensor,
    kernel_h: int,
    kernel_w: int,
    stride_h: int,
    stride_w: int,
    pad_h: int,
    pad_w: int,
    dilation_h: int,
    dilation_w: int,
    deformable_group: int,
) -> list[Tensor]:
    """The gradients of input, offset, mask, weight and bias, by that of the outputs."""
    options = (stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w)
    return gradients(grad_output, input, offset, mask, weight, options, (1, deformable_group))


def dcn_v2_psroi_pooling_forward(
    input: Tensor,
    bbox: Tensor,
    trans: Tensor,
    no_trans: int,
    spatial_scale: float,
    output_dim: int,
    group_size: int,
    pooled_size: int,
    part_size: int,
    sample_per_part: int,
    trans_std: float,
) -> tuple[Tensor, Tensor]:
    """(n, o, P, P), and how many samples counted; see `_psroi` for the arguments."""
    return psroi_pooling(
        input,
        bbox,
        trans,
        bool(no_trans),
        spatial_scale,
        output_dim,
        group_size,
        pooled_size,
        part_size,
        sample_per_part,
        trans_std,
    )


def dcn_v2_psroi_pooling_backward(
    out_grad: Tensor,
    input: Tensor,
    bbox: Tensor,
    trans: Tensor,
    top_count: Tensor,
    no_trans: int,
    spatial_scale: float,
    output_dim: int,
    group_size: int,
    pooled_size: int,
    part_size: int,
    sample_per_part: int,
    trans_std: float,
) -> tuple[Tensor, Tensor]:
    """The gradients of input and trans, by that of the outputs."""
    return psroi_pooling_gradients(
        out_grad,
        input,
        bbox,
        trans,
        bool(no_trans),
        spatial_scale,
        output_dim,
        group_size,
        pooled_size,
        part_size,
        sample_per_part,
        trans_std,
    )
