"""Stands in for `DCNv3`, the extension of InternImage."""

from typing import Any

from torch import Tensor

from fuseport.exporter.shims._dcn import dcnv3_forward
from fuseport.exporter.shims._gradients import differentiated

__all__ = ["dcnv3_backward", "dcnv3_forward"]


def dcnv3_backward(
    input: Tensor,
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
    group: int,
    group_channels: int,
    offset_scale: float,
    grad_output: Tensor,
    im2col_step: int,
    remove_center: int = 0,
) -> list[Any]:
    """The gradients of input, offset and mask, by that of the outputs."""

    window = (kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w)
    groups = (group, group_channels, offset_scale, im2col_step, remove_center)

    def forward(input: Any, offset: Any, mask: Any) -> Tensor:
        return dcnv3_forward(input, offset, mask, *window, *groups)

    return differentiated(forward, (input, offset, mask), grad_output)
