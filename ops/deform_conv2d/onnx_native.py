"""The convolution as `DeformConv`, which ONNX has from opset 19 on."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fuseport.ops.deform_conv2d.shapes import Options

__all__ = ["TYPES", "decompositions"]

TYPES = {"DeformConv"}


def decompositions() -> dict[str, Callable[..., Any]]:
    """Forms in that operator, by name of ours; one returns None for what it has not."""
    return {"deform_conv2d": _plain, "deform_conv2d_modulated": _modulated}


def _plain(input: Tensor, offset: Tensor, weight: Tensor, bias: Tensor, *options: int) -> Any:
    return _node(input, offset, None, weight, bias, Options(*options))


def _modulated(
    input: Tensor, offset: Tensor, mask: Tensor, weight: Tensor, bias: Tensor, *options: int
) -> Any:
    return _node(input, offset, mask, weight, bias, Options(*options))


def _node(
    input: Tensor,
    offset: Tensor,
    mask: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    given: Options,
) -> Tensor | None:
    if input.dtype == torch.float64 or 0 in weight.shape:  # ONNX Runtime has a float32 kernel
        return None
    taps = weight.shape[2] * weight.shape[3]
    wide = [None if t is None else t.float() for t in (input, weight, offset, bias, mask)]
    out = torch.onnx.ops.symbolic(
        "DeformConv",
        wide,
        {
            "strides": [given.stride_h, given.stride_w],
            "pads": [given.padding_h, given.padding_w] * 2,
            "dilations": [given.dilation_h, given.dilation_w],
            "kernel_shape": list(weight.shape[2:]),
            "group": input.shape[1] // weight.shape[1],
            "offset_group": offset.shape[1] // (2 * taps),
        },
        dtype=torch.float32,
        shape=(input.shape[0], bias.shape[0], *offset.shape[2:]),
        version=22,
    )
    return out.to(input.dtype)
