"""Deformable convolution in plain torch, forward and backward.

Any device, and any dtype that the op takes; in float64 it is the truth of a verification. Sums are
of float32 at least. Backward is stated explicitly, because autograd cannot be called inside a
registered operator. With w_k the shares of the pixels v_k around a tap in its sample
(`ms_deform_attn.bilinear`), m its mask, and g the cotangent of m times its sample, which is that of
a column of the product with the weight:

    dm = Σ_k w_k (g·v_k)        dv_k = Σ m w_k g over all taps that see the pixel
    ddy = m Σ_k ∂w_k/∂y (g·v_k)        ddx = m Σ_k ∂w_k/∂x (g·v_k)
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from fuseport.ops.deform_conv2d.shapes import (
    Geometry,
    Options,
    check,
    check_cotangent,
    check_pixels,
)
from fuseport.ops.ms_deform_attn.bilinear import Corner, corners

__all__ = [
    "deform_conv2d",
    "deform_conv2d_backward",
    "deform_conv2d_modulated",
    "deform_conv2d_modulated_backward",
]


def deform_conv2d(x: Tensor, offset: Tensor, weight: Tensor, bias: Tensor, *options: int) -> Tensor:
    """out, (b, o, oh, ow), contiguous."""
    given = Options(*options)
    sizes = check("deform_conv2d", x, offset, None, weight, bias, given)
    check_pixels("deform_conv2d", x)
    return _forward(x, offset, None, weight, bias, given, sizes)


def deform_conv2d_modulated(
    x: Tensor, offset: Tensor, mask: Tensor, weight: Tensor, bias: Tensor, *options: int
) -> Tensor:
    """The same, with each sample times its mask."""
    given = Options(*options)
    sizes = check("deform_conv2d_modulated", x, offset, mask, weight, bias, given)
    check_pixels("deform_conv2d_modulated", x)
    return _forward(x, offset, mask, weight, bias, given, sizes)


def deform_conv2d_backward(
    dout: Tensor, x: Tensor, offset: Tensor, weight: Tensor, bias: Tensor, *options: int
) -> tuple[Tensor, ...]:
    """(dinput, doffset, dweight, dbias), each in its input's shape and dtype."""
    op, given = "deform_conv2d_backward", Options(*options)
    sizes = check(op, x, offset, None, weight, bias, given)
    check_pixels(op, x)
    check_cotangent(op, dout, x, weight, sizes)
    dx, doffset, _, dweight, dbias = _backward(dout, x, offset, None, weight, given, sizes)
    return dx, doffset, dweight, dbias


def deform_conv2d_modulated_backward(
    dout: Tensor,
    x: Tensor,
    offset: Tensor,
    mask: Tensor,
    weight: Tensor,
    bias: Tensor,
    *options: int,
) -> tuple[Tensor, ...]:
    """(dinput, doffset, dmask, dweight, dbias), each in its input's shape and dtype."""
    op, given = "deform_conv2d_modulated_backward", Options(*options)
    sizes = check(op, x, offset, mask, weight, bias, given)
    check_pixels(op, x)
    check_cotangent(op, dout, x, weight, sizes)
    return _backward(dout, x, offset, mask, weight, given, sizes)


# In the functions below: G offset groups of e channels, K taps, P outputs; samples are
# (b, G, K, oh, ow, e), columns (b, g, c/g·K, P).


def _forward(
    x: Tensor,
    offset: Tensor,
    mask: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    options: Options,
    sizes: Geometry,
) -> Tensor:
    columns = _columns(x, offset, mask, weight, options, sizes)
    o = weight.shape[0]
    kernel = _wide(weight).reshape(sizes.groups, o // sizes.groups, columns.shape[2])
    out = (kernel @ columns).reshape(x.shape[0], o, sizes.rows, sizes.columns)
    return _plain(out + _wide(bias)[:, None, None], x.dtype)


def _backward(
    dout: Tensor,
    x: Tensor,
    offset: Tensor,
    mask: Tensor | None,
    weight: Tensor,
    options: Options,
    sizes: Geometry,
) -> tuple[Tensor, ...]:
    b, c, height, width = x.shape
    taps = weight.shape[2] * weight.shape[3]
    G, (rows, columns) = sizes.offset_groups, sizes[2:]
    e = c // G
    g = _wide(dout)
    seen = _columns(x, offset, mask, weight, options, sizes)
    per_group = weight.shape[0] // sizes.groups
    g_groups = g.reshape(b, sizes.groups, per_group, rows * columns)
    kernel = _wide(weight).reshape(sizes.groups, per_group, seen.shape[2])
    dweight = (g_groups @ seen.mT).sum(0)
    dcolumns = kernel.mT @ g_groups
    dsamples = dcolumns.reshape(b, G, e, taps, rows, columns).movedim(2, -1)

    factor = None if mask is None else _wide(mask).reshape(b, G, taps, rows, columns)
    table = _table(x, G)
    dtable = torch.zeros_like(table)
    dmask, dx, dy = (table.new_zeros((b, G, taps, rows, columns)) for _ in range(3))
    for corner, at in _corners(x, offset, weight, options, sizes):
        dots = (table[at] * dsamples).sum(-1)
        dmask = dmask + corner.weight * dots
        dx = dx + corner.slope_x * dots
        dy = dy + corner.slope_y * dots
        share = corner.weight if factor is None else corner.weight * factor
        given = (share.unsqueeze(-1) * dsamples).flatten(0, 4)
        dtable = dtable.scatter_add(0, at.flatten().unsqueeze(1).expand(-1, e), given)
    doffset = torch.stack((dy, dx), 3)
    if factor is not None:
        doffset = doffset * factor.unsqueeze(3)
    dinput = dtable.reshape(b, G, height * width + 1, e)[:, :, :-1].mT
    return (
        _plain(dinput.reshape(x.shape), x.dtype),
        _plain(doffset.reshape(offset.shape), x.dtype),
        _plain(dmask.reshape(b, G * taps, rows, columns), x.dtype),
        _plain(dweight.reshape(weight.shape), x.dtype),
        _plain(g.sum((0, 2, 3)), x.dtype),
    )


def _columns(
    x: Tensor,
    offset: Tensor,
    mask: Tensor | None,
    weight: Tensor,
    options: Options,
    sizes: Geometry,
) -> Tensor:
    """What the weight is multiplied with."""
    table = _table(x, sizes.offset_groups)
    samples = None
    for corner, at in _corners(x, offset, weight, options, sizes):
        part = corner.weight.unsqueeze(-1) * table[at]
        samples = part if samples is None else samples + part
    assert samples is not None
    if mask is not None:
        samples = samples * _wide(mask).reshape(samples.shape[:-1]).unsqueeze(-1)
    taps = weight.shape[1] * weight.shape[2] * weight.shape[3]
    return samples.movedim(-1, 2).reshape(
        x.shape[0], sizes.groups, taps, sizes.rows * sizes.columns
    )


def _table(x: Tensor, groups: int) -> Tensor:
    """A row of e channels for each pixel of each group, and of one more, which is zero."""
    b, c, height, width = x.shape
    pixels = _wide(x).reshape(b, groups, c // groups, height * width).mT
    return torch.nn.functional.pad(pixels, (0, 0, 0, 1)).flatten(0, 2)


def _corners(
    x: Tensor, offset: Tensor, weight: Tensor, options: Options, sizes: Geometry
) -> Iterator[tuple[Corner, Tensor]]:
    """Corners of all samples, (b, G, K, oh, ow), each with the rows of `_table` that they are."""
    b, _, height, width = x.shape
    (kh, kw), groups = weight.shape[2:], sizes.offset_groups
    moved = _wide(offset).reshape(b, groups, kh * kw, 2, sizes.rows, sizes.columns)
    taps, outputs_y, outputs_x = (
        torch.arange(n, device=x.device) for n in (kh * kw, sizes.rows, sizes.columns)
    )
    first_y = outputs_y[:, None] * options.stride_h - options.padding_h
    first_x = outputs_x * options.stride_w - options.padding_w
    tap_y = (taps // kw * options.dilation_h)[:, None, None]
    tap_x = (taps % kw * options.dilation_w)[:, None, None]
    y = (first_y + tap_y) + moved[:, :, :, 0]
    sample_x = (first_x + tap_x) + moved[:, :, :, 1]
    pixels = height * width
    begins = torch.arange(b * groups, device=x.device) * (pixels + 1)
    begin = begins.reshape(b, groups, 1, 1, 1)
    for corner in corners(sample_x, y, width, height):
        yield corner, torch.where(corner.index < 0, pixels, corner.index) + begin


def _wide(t: Tensor) -> Tensor:
    return t if t.dtype == torch.float64 else t.float()


def _plain(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t.to(dtype).clone(memory_format=torch.contiguous_format)
