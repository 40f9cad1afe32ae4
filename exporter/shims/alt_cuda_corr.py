"""Stands in for `alt_cuda_corr`, the correlation of RAFT that is computed where it is looked up."""

import torch
from torch import Tensor

from fuseport.exporter.shims._gradients import differentiated
from fuseport.exporter.shims._lookup import between, taps

__all__ = ["backward", "forward"]


def forward(fmap1: Tensor, fmap2: Tensor, coords: Tensor, radius: int) -> list[Tensor]:
    """The correlations of each place of `fmap1` with a window of `fmap2`.

    All pairs are multiplied, and looked up afterwards: that takes memory for h·w·h'·w' numbers,
    unlike the extension, and autograd keeps less than of windows of features.

    Args:
        fmap1: (b, h, w, c).
        fmap2: (b, h', w', c).
        coords: the centres of the windows, in pixels of `fmap2`, x first: (b, n, h, w, 2). They
            have no gradient, as in the extension.
        radius: of the windows, which are bilinear between pixels, and zero outside of the map.

    Returns:
        One tensor, (b, n, (2·radius + 1)², h, w), the columns of a window one after another.
    """
    (b, h, w, c), (rows, columns), n = fmap1.shape, fmap2.shape[1:3], coords.shape[1]
    pairs = fmap1.reshape(b, h * w, c) @ fmap2.reshape(b, rows * columns, c).mT
    x, y = coords.detach().reshape(b, n, h * w, 2).transpose(1, 2).unbind(-1)
    column, inside_x, right = taps(x, radius, columns)
    row, inside_y, down = taps(y, radius, rows)
    index = row.unsqueeze(-1) * columns + column.unsqueeze(-2)
    inside = inside_y.unsqueeze(-1) & inside_x.unsqueeze(-2)
    found = pairs.gather(2, index.flatten(2)).unflatten(2, index.shape[2:])
    found = found.masked_fill(~inside, 0)
    found = between(found, right[..., None, None].to(found.dtype), -1)
    found = between(found, down[..., None, None].to(found.dtype), -2)
    # (b, places, n, y, x)
    side = 2 * radius + 1
    return [found.permute(0, 2, 4, 3, 1).reshape(b, n, side * side, h, w)]


def backward(
    fmap1: Tensor, fmap2: Tensor, coords: Tensor, corr_grad: Tensor, radius: int
) -> list[Tensor]:
    """The gradients of fmap1, fmap2 and coords, by that of the output; the last is zero."""

    def of_maps(one: Tensor, two: Tensor) -> Tensor:
        return forward(one, two, coords, radius)[0]

    found = differentiated(of_maps, [fmap1, fmap2], corr_grad)
    return [*found, torch.zeros_like(coords)]
