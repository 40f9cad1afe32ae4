"""What the inputs of a deformable convolution must be, and the shapes and dtypes of its outputs.

All outputs are contiguous. `geometry.hpp` has the same checks in the same order with the same
messages, for hosts that have no Python.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fuseport.ops.checks import dtype_name, require, require_like, require_shape
from fuseport.ops.spec import FLOATING

__all__ = [
    "Geometry",
    "Options",
    "check",
    "check_cotangent",
    "check_pixels",
    "fake_modulated",
    "fake_modulated_backward",
    "fake_plain",
    "fake_plain_backward",
]


_LIMIT = 2**31 - 1  # kernels count pixels in 32 bits


class Options(NamedTuple):
    """What an operator takes after its tensors, in that order."""

    stride_h: int
    stride_w: int
    padding_h: int
    padding_w: int
    dilation_h: int
    dilation_w: int


class Geometry(NamedTuple):
    """Sizes that follow from the inputs."""

    groups: int
    offset_groups: int
    rows: int  # of the output
    columns: int


def check(
    op: str,
    x: Tensor,
    offset: Tensor,
    mask: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    options: Options,
) -> Geometry:
    """The sizes; raises ValueError, naming `op` and the argument, unless the inputs fit."""
    require(x.dim() == 4, op, "input", "(b, c, H, W)", tuple(x.shape))
    name = dtype_name(x.dtype)
    require(x.dtype in FLOATING, op, "input", "float16, bfloat16, float32 or float64", name)
    for name, value in options._asdict().items():
        least = 0 if name.startswith("padding") else 1
        require(value >= least, op, name, f"{least} or more", value)
        require(value <= _LIMIT, op, name, "2^31 - 1 or less", value)
    b, c, height, width = x.shape

    require_like(op, "weight", weight, x.dtype, x, "input")
    require(weight.dim() == 4, op, "weight", "(o, c/g, kh, kw)", tuple(weight.shape))
    o, per_group, kh, kw = weight.shape
    require(kh >= 1 and kw >= 1, op, "weight", "of kh and kw 1 or more", (kh, kw))
    divides = per_group >= 1 and c >= 1 and c % per_group == 0
    require(divides, op, "weight", f"of groups that divide {c} channels", per_group)
    groups = c // per_group
    require(o % groups == 0, op, "weight", f"of channels that {groups} groups divide", o)
    require_like(op, "bias", bias, x.dtype, x, "input")
    require_shape(op, "bias", bias, "(o,)", (o,))

    rows = _outputs(height, options.padding_h, options.dilation_h, kh, options.stride_h)
    columns = _outputs(width, options.padding_w, options.dilation_w, kw, options.stride_w)
    fits = rows >= 1 and columns >= 1
    require(fits, op, "input", "so large that there is an output", (height, width))
    require_like(op, "offset", offset, x.dtype, x, "input")
    require(offset.dim() == 4, op, "offset", "(b, 2*G*kh*kw, oh, ow)", tuple(offset.shape))
    parts = offset.shape[1]
    taps = kh * kw
    whole = parts >= 1 and parts % (2 * taps) == 0
    require(whole, op, "offset", f"of a multiple of {2 * taps} channels", parts)
    offset_groups = parts // (2 * taps)
    expected = f"of offset groups that divide {c} channels"
    require(c % offset_groups == 0, op, "offset", expected, offset_groups)
    require_shape(op, "offset", offset, "(b, 2*G*kh*kw, oh, ow)", (b, parts, rows, columns))
    if mask is not None:
        require_like(op, "mask", mask, x.dtype, x, "input")
        shape = (b, offset_groups * taps, rows, columns)
        require_shape(op, "mask", mask, "(b, G*kh*kw, oh, ow)", shape)
    return Geometry(groups, offset_groups, rows, columns)


def check_pixels(op: str, x: Tensor) -> None:
    """Raises ValueError for an image too large; apart from `check`, where sizes may be symbols."""
    height, width = x.shape[2:]
    require(height * width <= _LIMIT, op, "input", "of at most 2^31 - 1 pixels", (height, width))


def check_cotangent(op: str, dout: Tensor, x: Tensor, weight: Tensor, sizes: Geometry) -> None:
    """Raises ValueError unless the cotangent fits inputs that passed `check`."""
    require_like(op, "dout", dout, x.dtype, x, "input")
    shape = (x.shape[0], weight.shape[0], sizes.rows, sizes.columns)
    require_shape(op, "dout", dout, "(b, o, oh, ow)", shape)


def _outputs(size: int, padding: int, dilation: int, taps: int, stride: int) -> int:
    return (size + 2 * padding - dilation * (taps - 1) - 1) // stride + 1


def _empty(t: Tensor) -> Tensor:
    return torch.empty(t.shape, dtype=t.dtype, device=t.device)


def fake_plain(x: Tensor, offset: Tensor, weight: Tensor, bias: Tensor, *options: int) -> Tensor:
    """An empty output of `fuseport::deform_conv2d`."""
    sizes = check("deform_conv2d", x, offset, None, weight, bias, Options(*options))
    return x.new_empty((x.shape[0], weight.shape[0], sizes.rows, sizes.columns))


def fake_modulated(
    x: Tensor, offset: Tensor, mask: Tensor, weight: Tensor, bias: Tensor, *options: int
) -> Tensor:
    """An empty output of `fuseport::deform_conv2d_modulated`."""
    sizes = check("deform_conv2d_modulated", x, offset, mask, weight, bias, Options(*options))
    return x.new_empty((x.shape[0], weight.shape[0], sizes.rows, sizes.columns))


def fake_plain_backward(
    dout: Tensor, x: Tensor, offset: Tensor, weight: Tensor, bias: Tensor, *options: int
) -> tuple[Tensor, ...]:
    """Empty outputs of `fuseport::deform_conv2d_backward`."""
    op = "deform_conv2d_backward"
    sizes = check(op, x, offset, None, weight, bias, Options(*options))
    check_cotangent(op, dout, x, weight, sizes)
    return tuple(map(_empty, (x, offset, weight, bias)))


def fake_modulated_backward(
    dout: Tensor,
    x: Tensor,
    offset: Tensor,
    mask: Tensor,
    weight: Tensor,
    bias: Tensor,
    *options: int,
) -> tuple[Tensor, ...]:
    """Empty outputs of `fuseport::deform_conv2d_modulated_backward`."""
    op = "deform_conv2d_modulated_backward"
    sizes = check(op, x, offset, mask, weight, bias, Options(*options))
    check_cotangent(op, dout, x, weight, sizes)
    return tuple(map(_empty, (x, offset, mask, weight, bias)))
