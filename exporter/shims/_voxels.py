"""Sparse convolution and pooling over voxels, in plain torch, for any number of them.

As spconv has them (B. Graham et al., "3D Semantic Segmentation with Submanifold Sparse
Convolutional Networks", 2018). A voxel is a row of coordinates, (batch, x₀, …, x_{d-1}), with a row
of features. Rows are found by one number that a place has, in a sorted list of these, so memory
goes with voxels and not with the volume: O(n·K·log n) for n voxels and windows of K places.

Voxels are taken to be unique, as there. Of those that are alike, the first is what others find.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "Geometry",
    "averaged",
    "convolved",
    "densified",
    "gathered",
    "largest",
    "located",
    "matched",
    "occupied",
    "reached",
    "taken",
    "voxels",
    "within",
]

# Added to a number it makes it negative, whatever its other parts are.
_OUTSIDE = -(2**58)
_LAST = 2**62


@dataclass(frozen=True)
class Geometry:
    """A window and how it moves, in each of d dimensions.

    Attributes:
        size, stride, padding, dilation: of d numbers each.
        transposed: the window spreads a voxel's features in place of gathering them.
    """

    size: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool = False

    def turned(self) -> "Geometry":
        """The same the other way round: from outputs to inputs."""
        return replace(self, transposed=not self.transposed)

    def span(self, dim: int) -> int:
        """How far its last place is from its first, in one dimension."""
        return (self.size[dim] - 1) * self.dilation[dim]

    def each(self, dim: int, like: Tensor) -> Tensor:
        """(k,): how far each place is from the first, in one dimension."""
        return torch.arange(self.size[dim], device=like.device) * self.dilation[dim]


def reached(indices: Tensor, geometry: Geometry, shape: Sequence[Any], batch: Any) -> Tensor:
    """(n, K): numbers of the places of a volume that see a voxel in a place of their window.

    Args:
        indices: of voxels, (n, 1 + d).
        geometry: leads from voxels to places.
        shape: of the volume.
        batch: how many volumes there are; what is in another is seen by none.

    Returns:
        Of the window's K places the last dimension changes first; -1 where none sees it there.
    """
    column, *columns = indices.long().unbind(1)
    number = torch.where(column < batch, column * math.prod(shape), _OUTSIDE)[:, None]
    for dim, x in enumerate(columns):
        step, padding, extent = geometry.stride[dim], geometry.padding[dim], shape[dim]
        if geometry.transposed:
            place = x[:, None] * step - padding + geometry.each(dim, x)
            is_there = (place >= 0) & (place < extent)
        else:
            moved = x[:, None] + padding - geometry.each(dim, x)
            place = moved.div(step, rounding_mode="floor") if step > 1 else moved
            is_there = (place >= 0) & (place < extent)
            is_there = is_there & (moved % step == 0) if step > 1 else is_there
        part = torch.where(is_there, place * math.prod(shape[dim + 1 :]), _OUTSIDE)
        number = (number[:, :, None] + part[:, None]).flatten(1)
    return number.clamp(min=-1)


def occupied(places: Tensor) -> Tensor:
    """(m,): the numbers that there are, but -1, each once, in order."""
    found = places.flatten().sort().values
    before = torch.cat([found.new_full((1,), -1), found])[:-1]
    return found[found != before]


def voxels(numbers: Tensor, shape: Sequence[Any], dtype: torch.dtype) -> Tensor:
    """(m, 1 + d): the coordinates of numbers, (m,)."""
    columns = []
    for extent in reversed(shape):
        columns.append(numbers % extent)
        numbers = numbers.div(extent, rounding_mode="floor")
    return torch.stack([numbers, *reversed(columns)], 1).to(dtype)


def located(places: Tensor, numbers: Tensor) -> Tensor:
    """Where places are among sorted numbers, (m,), that have all of them; m for -1."""
    row = torch.searchsorted(numbers, places)
    return torch.where(places >= 0, row, numbers.shape[0])


def matched(of: Tensor, to: Tensor, geometry: Geometry, shape: Sequence[Any], batch: Any) -> Tensor:
    """(m, K): the rows of `of` that the windows of `to` have in them, n for places with none.

    Args:
        of: voxels in a volume of `shape`, (n, 1 + d).
        to: voxels, (m, 1 + d).
        geometry: of a convolution from `of` to `to`.
        batch: how many volumes there are.
    """
    if geometry.transposed:
        strides = [math.prod(shape[i:]) for i in range(len(shape) + 1)]
        wanted = reached(to, geometry.turned(), shape, batch)
    else:
        # In a volume so much larger, what lies beside the volume has numbers that no voxel has.
        dims = range(len(shape))
        wide = [shape[i] + 2 * geometry.padding[i] + geometry.span(i) for i in dims]
        strides = [math.prod(wide[i:]) for i in range(len(shape) + 1)]
        steps = zip(strides, (1, *geometry.stride), strict=True)
        start = _weighted(to, [stride * step for stride, step in steps])
        start = start - sum(strides[i + 1] * geometry.padding[i] for i in dims)
        window = geometry.each(0, of) * strides[1]
        for i in dims[1:]:
            window = (window[:, None] + geometry.each(i, of) * strides[i + 1]).flatten()
        wanted = start[:, None] + window
    known, order = _weighted(of, strides).sort(stable=True)
    place = torch.searchsorted(known, wanted)
    is_there = torch.cat([known, known.new_full((1,), _LAST)])[place] == wanted
    order = torch.cat([order, order.new_zeros((1,))])
    return torch.where(is_there, order[place], of.shape[0])


def within(rows: Tensor) -> Tensor:
    """(n, K): rows of windows around voxels themselves, of which the middle is the voxel."""
    middle = torch.arange(rows.shape[1], device=rows.device) == rows.shape[1] // 2
    return torch.where(middle, torch.arange(rows.shape[0], device=rows.device)[:, None], rows)


def _weighted(indices: Tensor, weights: Sequence[Any]) -> Tensor:
    """(n,): sums of the columns of indices, (n, 1 + d), each times a number."""
    first, *others = (x * n for x, n in zip(indices.long().unbind(1), weights, strict=True))
    total: Tensor = sum(others, start=first)
    return total


def taken(features: Tensor, rows: Tensor) -> Tensor:
    """(m, c): of windows of one place, what is in it."""
    return gathered(features, rows).squeeze(1)


def gathered(features: Tensor, rows: Tensor) -> Tensor:
    """(m, K, c): features of rows, zeros where there is none."""
    padded = torch.cat([features, features.new_zeros((1, features.shape[1]))])
    found: Tensor = padded.index_select(0, rows.flatten()).unflatten(0, rows.shape)
    return found


def convolved(features: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(m, o) of features (n, c), rows (m, K), a weight (o, …, c) of K places and a bias (o,)."""
    out: Tensor = gathered(features, rows).flatten(1) @ weight.flatten(1).T
    return out if bias is None else out + bias


def largest(features: Tensor, rows: Tensor) -> Tensor:
    """(m, c): the largest value in each window, 0 if all are less, as spconv begins with zeros.

    All values that are as large have the whole of the gradient, as there.
    """
    found = gathered(features, rows)
    values = found.detach()
    most: Tensor = values.amax(1).clamp(min=0)
    is_most = (values == most[:, None]) & (rows < features.shape[0])[..., None]
    return most + torch.where(is_most, found - values, 0).sum(1)


def averaged(features: Tensor, rows: Tensor) -> Tensor:
    """(m, c): the mean of the voxels that are in each window."""
    count = (rows < features.shape[0]).sum(1, keepdim=True).clamp(min=1)
    mean: Tensor = gathered(features, rows).sum(1) / count
    return mean


def densified(features: Tensor, indices: Tensor, shape: Sequence[Any], batch: Any) -> Tensor:
    """(batch, …shape, c): features where their voxels are, and zeros; those alike are added."""
    zeros = features.new_zeros((math.prod(shape) * batch, features.shape[1]))
    strides = [math.prod(shape[i:]) for i in range(len(shape) + 1)]
    volume = zeros.index_add(0, _weighted(indices, strides), features)
    return volume.reshape(batch, *shape, features.shape[1])
