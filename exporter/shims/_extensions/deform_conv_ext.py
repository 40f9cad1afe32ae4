"""Stands in for `deform_conv_ext`, the extension of BasicSR, EDVR and mmdetection 1 and 2.

Its functions write into what they are given: `output`, and gradients, to which those of input,
weight and bias are added. `columns`, `ones` and `im2col_step` are for memory of their own, which
the op has no need of.
"""

from torch import Tensor

from fuseport.exporter.shims._deform import conv, gradients

__all__ = [
    "deform_conv_backward_input",
    "deform_conv_backward_parameters",
    "deform_conv_forward",
    "modulated_deform_conv_backward",
    "modulated_deform_conv_forward",
]

# The names of arguments are mmcv's, whose code gives them by name.


def deform_conv_forward(
    input: Tensor,
    weight: Tensor,
    offset: Tensor,
    output: Tensor,
    columns: Tensor,
    ones: Tensor,
    kW: int,
    kH: int,
    dW: int,
    dH: int,
    padW: int,
    padH: int,
    dilationW: int,
    dilationH: int,
    group: int,
    deformable_group: int,
    im2col_step: int,
) -> None:
    """Without a mask: writes (b, o, oh, ow) to `output`; d are strides."""
    options = (dH, dW, padH, padW, dilationH, dilationW)
    groups = (group, deformable_group)
    output.copy_(conv(input, offset, None, weight, None, options, groups).view_as(output))


def deform_conv_backward_input(
    input: Tensor,
    offset: Tensor,
    gradOutput: Tensor,
    gradInput: Tensor,
    gradOffset: Tensor,
    weight: Tensor,
    columns: Tensor,
    kW: int,
    kH: int,
    dW: int,
    dH: int,
    padW: int,
    padH: int,
    dilationW: int,
    dilationH: int,
    group: int,
    deformable_group: int,
    im2col_step: int,
) -> None:
    """Adds to `gradInput` and writes `gradOffset`."""
    options = (dH, dW, padH, padW, dilationH, dilationW)
    groups = (group, deformable_group)
    found = gradients(gradOutput, input, offset, None, weight, options, groups)
    gradInput.add_(found[0])
    gradOffset.copy_(found[1])


def deform_conv_backward_parameters(
    input: Tensor,
    offset: Tensor,
    gradOutput: Tensor,
    gradWeight: Tensor,
    columns: Tensor,
    ones: Tensor,
    kW: int,
    kH: int,
    dW: int,
    dH: int,
    padW: int,
    padH: int,
    dilationW: int,
    dilationH: int,
    group: int,
    deformable_group: int,
    scale: float,
    im2col_step: int,
) -> None:
    """Adds `scale` times the gradient of weight to `gradWeight`."""
    options = (dH, dW, padH, padW, dilationH, dilationW)
    groups = (group, deformable_group)
    # The gradient of weight does not depend on it: one of its shape will do.
    found = gradients(gradOutput, input, offset, None, gradWeight, options, groups)
    gradWeight.add_(found[2], alpha=scale)


def modulated_deform_conv_forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    ones: Tensor,
    offset: Tensor,
    mask: Tensor,
    output: Tensor,
    columns: Tensor,
    kernel_h: int,
    kernel_w: int,
    stride_h: int,
    stride_w: int,
    pad_h: int,
    pad_w: int,
    dilation_h: int,
    dilation_w: int,
    group: int,
    deformable_group: int,
    with_bias: bool,
) -> None:
    """With a mask: writes (b, o, oh, ow) to `output`; `bias` is used if `with_bias`."""
    options = (stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w)
    groups = (group, deformable_group)
    used = bias if with_bias else None
    output.copy_(conv(input, offset, mask, weight, used, options, groups).view_as(output))


def modulated_deform_conv_backward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    ones: Tensor,
    offset: Tensor,
    mask: Tensor,
    columns: Tensor,
    grad_input: Tensor,
    grad_weight: Tensor,
    grad_bias: Tensor,
    grad_offset: Tensor,
    grad_mask: Tensor,
    grad_output: Tensor,
    kernel_h: int,
    kernel_w: int,
    stride_h: int,
    stride_w: int,
    pad_h: int,
    pad_w: int,
    dilation_h: int,
    dilation_w: int,
    group: int,
    deformable_group: int,
    with_bias: bool,
) -> None:
    """Adds to the gradients of input, weight and, if `with_bias`, bias; writes the others."""
    options = (stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w)
    groups = (group, deformable_group)
    found = gradients(grad_output, input, offset, mask, weight, options, groups)
    dinput, doffset, dmask, dweight, dbias = found
    grad_input.add_(dinput)
    grad_offset.copy_(doffset)
    grad_mask.copy_(dmask)
    grad_weight.add_(dweight)
    if with_bias:
        grad_bias.add_(dbias)
