"""Drawn rows of coordinates, such as those of voxels."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["places", "volume_of"]

_ROOM = 4  # places for each row that is drawn
_COUNTED = 2**20  # places that are all put in an order
_MOST = 5  # columns: a batch, and as many dimensions as spconv has


def places(count: int, volume: Sequence[int], generator: torch.Generator) -> Tensor:
    """(count, d): rows that differ, as long as there are as many, and lie near each other.

    As many rows in a large volume would have no neighbours, of which models of voxels are made.

    Args:
        count: of rows.
        volume: the exclusive bound of each column.
        generator: on the CPU.
    """
    edge = 1
    while math.prod(min(size, edge) for size in volume) < _ROOM * count and edge < max(volume):
        edge += 1
    box = [min(size, edge) for size in volume]
    total = math.prod(box)
    numbers = torch.randint(total, (2 * count,), generator=generator)
    if count <= total:
        different = numbers.unique() if total > _COUNTED else torch.arange(total)
        numbers = different[torch.randperm(len(different), generator=generator)]
    columns, rest = [], numbers[:count]
    for size, whole in zip(reversed(box), reversed(volume), strict=True):
        start = torch.randint(whole - size + 1, (1,), generator=generator)
        columns.append(rest % size + start)
        rest = rest // size
    return torch.stack(columns[::-1], 1)


def volume_of(rows: Tensor) -> tuple[int, ...] | None:
    """The bounds of columns, if rows of integers are those of places: few, and all different."""
    if rows.dim() != 2 or not 1 < rows.shape[1] <= _MOST or len(rows) < 2:
        return None
    if rows.min() < 0 or len(rows.unique(dim=0)) < len(rows):
        return None
    return tuple(int(most) + 1 for most in rows.amax(0))
