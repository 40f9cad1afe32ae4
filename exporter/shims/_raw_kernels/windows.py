"""Sums and differences over windows of an image with weights of each place's own, in torch."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["aggregated", "counts", "involved", "pair", "resampled", "subtracted"]

Pair = int | tuple[int, int]


def involved(x: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    """Involution: (b, c, oh, ow). Source: D. Li et al., "Involution: Inverting the Inherence of
    Convolution for Visual Recognition", 2021, equation 4.

    Args:
        x: (b, c, h, w), zero outside.
        weight: (b, groups, kh, kw, oh, ow).
        stride: as the others, of height and width or both.
        padding: the same.
        dilation: the same.
    """
    batch, groups, kh, kw, oh, ow = weight.shape
    grouped = (batch, groups, x.shape[1] // groups, oh, ow)
    places = _places(_padded(x, padding), (kh, kw), stride, dilation, (oh, ow))
    weights = (weight[:, :, None, i, j] for i in range(kh) for j in range(kw))
    sums = sum(p.reshape(grouped) * w for p, w in zip(places, weights, strict=True))
    assert isinstance(sums, Tensor)
    return sums.reshape(batch, x.shape[1], oh, ow)


def aggregated(
    x: Tensor,
    weight: Tensor,
    kernel_size: Pair,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    *,
    mode: str = "constant",
) -> Tensor:
    """Sums over windows: (b, heads·c, oh, ow). Source: H. Zhao, J. Jia, V. Koltun, "Exploring
    Self-attention for Image Recognition", 2020, equation 2; with heads as CoTNet has them.

    Args:
        x: (b, c, h, w).
        weight: (b, c', kernel, oh·ow) of one head, or (b, heads, c', kernel, oh, ow); channel i has
            the weights of i mod c'.
        kernel_size: as the others, of height and width or both.
        stride: the same.
        padding: the same.
        dilation: the same.
        mode: what is outside, `constant` for 0, or `reflect`.
    """
    batch, channels, *size = x.shape
    kernel, out = pair(kernel_size), counts(size, kernel_size, stride, padding, dilation)
    if weight.dim() == 4:
        weight = weight.reshape(batch, 1, -1, kernel[0] * kernel[1], *out)
    places = _places(_padded(x, padding, mode), kernel, stride, dilation, out)
    shape = (batch, 1, channels // weight.shape[2], weight.shape[2], *out)
    sums = sum(p.reshape(shape) * weight[:, :, None, :, k] for k, p in enumerate(places))
    assert isinstance(sums, Tensor)
    return sums.reshape(batch, weight.shape[1] * channels, *out)


def subtracted(
    one: Tensor,
    two: Tensor,
    kernel_size: Pair,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    *,
    mode: str = "constant",
) -> Tensor:
    """What is in the middle of windows less what is at their places: (b, c, kernel, oh·ow).

    Args:
        one: (b, c, h, w), of the middle.
        two: the same, of all places.
        kernel_size: for the rest, see `aggregated`.
    """
    kh, kw = kernel = pair(kernel_size)
    sizes = counts(one.shape[2:], kernel_size, stride, padding, dilation)
    middles = _places(_padded(one, padding), kernel, stride, dilation, sizes)
    middle = list(middles)[(kh - 1) // 2 * kw + (kw - 1) // 2]
    places = _places(_padded(two, padding, mode), kernel, stride, dilation, sizes)
    return torch.stack([middle - place for place in places], 2).flatten(3)


def resampled(x: Tensor, weight: Tensor, down: Tensor, right: Tensor, dilation: int) -> Tensor:
    """Adaptive collaboration of flows: (b, c, oh, ow). Source: H. Lee et al., "AdaCoF: Adaptive
    Collaboration of Flows for Video Frame Interpolation", 2020, equation 2.

    By bilinear weights about the pixel towards zero, those of its neighbours beyond the edge too.
    The image has no gradient, as the kernel gives it none.

    Args:
        x: (b, c, oh + (side - 1)·dilation, ow + (side - 1)·dilation); larger, or its edge outside.
        weight: (b, side², oh, ow).
        down: where a place is looked up further down, in pixels; the same shape.
        right: the same, further to the right.
        dilation: of the places, in pixels.
    """
    batch, channels, height, width = x.shape
    taps, oh, ow = weight.shape[1:]
    side = round(taps**0.5)
    flat = x.detach().flatten(2)
    tap = torch.arange(taps, device=x.device)[:, None, None]
    rows = torch.arange(oh, device=x.device)[:, None] + tap // side * dilation
    columns = torch.arange(ow, device=x.device) + tap % side * dilation
    whole = [t.detach().trunc() for t in (down, right)]
    fraction = [t - w for t, w in zip((down, right), whole, strict=True)]
    # Clamped before they are integers: offsets may be larger than these.
    start = [
        at + w.clamp(-2 * size, 2 * size).long()
        for at, w, size in zip((rows, columns), whole, (height, width), strict=True)
    ]
    sums = None
    for i in (0, 1):
        for j in (0, 1):
            row, column = (start[0] + i).clamp(0, height - 1), (start[1] + j).clamp(0, width - 1)
            index = (row * width + column).reshape(batch, 1, -1).expand(-1, channels, -1)
            values = flat.gather(2, index).view(batch, channels, taps, oh, ow)
            near = [f if k else 1 - f for f, k in zip(fraction, (i, j), strict=True)]
            part = (values * (weight * near[0] * near[1])[:, None]).sum(2)
            sums = part if sums is None else sums + part
    assert sums is not None
    return sums


def counts(
    size: Sequence[int], kernel_size: Pair, stride: Pair, padding: Pair, dilation: Pair
) -> tuple[int, int]:
    """How many windows an image has, in height and width."""
    options = map(pair, (kernel_size, stride, padding, dilation))
    down, right = (
        (n + 2 * pad - step * (kernel - 1) - 1) // by + 1
        for n, kernel, by, pad, step in zip(size, *options, strict=True)
    )
    return down, right


def pair(option: Pair) -> tuple[int, int]:
    """An option of height and width."""
    return (option, option) if isinstance(option, int) else (option[0], option[1])


def _padded(x: Tensor, padding: Pair, mode: str = "constant") -> Tensor:
    rows, columns = pair(padding)
    return F.pad(x, (columns, columns, rows, rows), mode) if rows or columns else x


def _places(
    x: Tensor, kernel_size: Pair, stride: Pair, dilation: Pair, sizes: tuple[int, int]
) -> Iterator[Tensor]:
    """Of each place of a window, rows first, what all windows have there: (b, c, oh, ow)."""
    (kh, kw), (sh, sw), (dh, dw) = map(pair, (kernel_size, stride, dilation))
    for i in range(kh):
        rows = x[:, :, i * dh : i * dh + (sizes[0] - 1) * sh + 1 : sh]
        for j in range(kw):
            yield rows[..., j * dw : j * dw + (sizes[1] - 1) * sw + 1 : sw]
