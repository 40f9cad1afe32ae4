"""What the raw kernels of video interpolation and optical flow compute, in torch and our ops."""

from math import isqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.ops.correlation import correlation

__all__ = ["absolute_differences", "adaptive_sums", "local_correlation", "splatted"]


def local_correlation(one: Tensor, two: Tensor, count: int, stride: int = 1) -> Tensor:
    """The mean over channels of products at displacements: (b, count, ⌈h/stride⌉, ⌈w/stride⌉).

    Args:
        one: (b, c, h, w).
        two: the same, displaced against it; zero outside.
        count: of displacements, a square, rows first.
        stride: of places, and of displacements.
    """
    side = isqrt(count)
    one, two = _wide(one), _wide(two)
    found = correlation(one, two, 1, side, stride, 0, 1, stride)
    return found.flatten(1, 2) / one.shape[1]


def absolute_differences(one: Tensor, two: Tensor, count: int) -> Tensor:
    """The mean over channels of absolute differences at displacements: (b, count, h, w).

    The slope at 0 is that to the right. For the arguments, see `local_correlation`.
    """
    side = isqrt(count)
    reach = side // 2
    height = one.shape[2]
    one, two = _wide(one), F.pad(_wide(two), (reach, reach, reach, reach)).unfold(3, side, 1)
    means = []
    for row in range(side):
        difference = one.unsqueeze(-1) - two[:, :, row : row + height]
        distance = torch.where(difference >= 0, difference, -difference)
        means.append(distance.mean(1).movedim(-1, 1))
    return torch.cat(means, 1)


def splatted(x: Tensor, flow: Tensor) -> Tensor:
    """x (b, c, h, w), each pixel added to the four around where it flows to.

    By bilinear weights; what flows outside, or nowhere that is finite, is lost (S. Niklaus, F. Liu,
    "Softmax Splatting for Video Frame Interpolation", 2020, section 3.1: summation splatting).

    Args:
        x: (b, c, h, w).
        flow: (b, 2, h, w), in pixels, to the right and down.
    """
    x, flow = _wide(x), _wide(flow)
    height, width = x.shape[2:]
    across = flow[:, 0] + torch.arange(width, device=x.device)
    down = flow[:, 1] + torch.arange(height, device=x.device)[:, None]
    finite = across.isfinite() & down.isfinite()
    row, of_row = _around(torch.where(finite, down, 0), height)
    column, of_column = _around(torch.where(finite, across, 0), width)
    # Of each corner: (b, rows, columns, h, w).
    row, column = row[:, :, None], column[:, None]
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    inside = inside & finite[:, None, None]
    index = torch.where(inside, row * width + column, 0).flatten(1)
    weight = torch.where(inside, of_row[:, :, None] * of_column[:, None], 0)
    values = x[:, :, None, None] * weight[:, None]
    sums = x.new_zeros(*x.shape[:2], height * width)
    sums = sums.scatter_add(2, index[:, None].expand(-1, x.shape[1], -1), values.flatten(2))
    out: Tensor = sums.unflatten(2, (height, width))
    return out


def _around(place: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The pixels before and after places (b, h, w), and their linear weights: (b, 2, h, w)."""
    before = place.detach().floor()
    after = place - before
    # Clamped before they are integers: a flow may be larger than these.
    pixel = before.clamp(-2, size).long()
    return torch.stack([pixel, pixel + 1], 1), torch.stack([1 - after, after], 1)


def adaptive_sums(x: Tensor, vertical: Tensor, horizontal: Tensor) -> Tensor:
    """Σ_{i, j} x[…, y + i, x + j] · vertical[i, y, x] · horizontal[j, y, x]: (b, c, h, w).

    Separable filters of each pixel's own (S. Niklaus, L. Mai, F. Liu, "Video Frame Interpolation
    via Adaptive Separable Convolution", 2017, section 3.1).

    Args:
        x: (b, c, h + taps - 1, w + taps - 1) or larger.
        vertical: (b, taps, h, w).
        horizontal: the same, of another number of taps, perhaps.
    """
    x, vertical, horizontal = _wide(x), _wide(vertical), _wide(horizontal)
    height, width = vertical.shape[2:]
    taps = horizontal.shape[1]
    rows = x[..., : width + taps - 1].unfold(3, taps, 1)
    weights = horizontal.movedim(1, -1)[:, None]
    sums = [
        (rows[:, :, i : i + height] * weights).sum(-1) * vertical[:, None, i]
        for i in range(vertical.shape[1])
    ]
    return torch.stack(sums).sum(0)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
