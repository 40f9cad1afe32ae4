"""Parts of one step along a dimension that may have none: `y[:, -1:]`, `y[:, 2:3]`.

Their size is no number, `min(n, 1)`, so nothing can be broadcast along it. Where a capture fails,
it is made again with one step there, and its program holds where the step is there.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import SymInt, Tensor

from fuseport.exporter.program.sizes.bounds import may_be_none

__all__ = ["part", "single"]


class _State:
    """Of the capture that is going on: whether such parts have one step, and those that may not."""

    taken = False
    seen: list[Any] | None = None


@contextmanager
def single(taken: bool, seen: list[Any]) -> Iterator[None]:
    """In a capture: such parts have one step if that is `taken` so, else `seen` has sizes."""
    with mock.patch.object(_State, "taken", taken), mock.patch.object(_State, "seen", seen):
        yield


def part(x: Tensor, index: Any) -> Any:
    """`x[index]`; NotImplemented where torch has the same."""
    if _State.seen is None or isinstance(index, int | list):
        return NotImplemented
    items = index if isinstance(index, tuple) else (index,)
    places = {dim: at for dim, at in _dims(x, items) if at is not None}
    if not places:
        return NotImplemented
    if not _State.taken:
        _State.seen += (x.shape[dim] for dim, _ in places.values())
        return NotImplemented
    rest = list(items)
    for number, (dim, place) in places.items():
        torch._check(x.shape[dim] >= _needed(place))
        x = x.select(dim, place).unsqueeze(dim)
        rest[number] = slice(None)
    return x[tuple(rest)]


def _dims(x: Tensor, items: Sequence[Any]) -> Iterator[tuple[int, tuple[int, int] | None]]:
    """By the number of each item: the dimension and the step, if it takes a single one."""
    if not all(map(_is_plain, items)):
        return
    taken = sum(item is not None and item is not Ellipsis for item in items)
    dim = 0
    for number, item in enumerate(items):
        if item is Ellipsis:
            dim += x.dim() - taken
        elif item is not None:
            if isinstance(item, slice) and dim < x.dim():
                place = _place(x.shape[dim], item)
                yield number, None if place is None else (dim, place)
            dim += 1


def _is_plain(item: Any) -> bool:
    # A mask, and what is read as one, may take several dimensions.
    if isinstance(item, Tensor):
        return item.dtype not in (torch.bool, torch.uint8)
    return item is None or item is Ellipsis or type(item) in (int, SymInt, slice)


def _place(size: Any, of: slice) -> int | None:
    """The step that a slice takes, if it is one in the example, and the sizes do not say so."""
    bounds = of.start, of.stop
    if not isinstance(size, SymInt) or of.step not in (None, 1) or size.node.hint is None:
        return None
    if not all(bound is None or type(bound) is int for bound in bounds):
        return None
    steps = range(*of.indices(size.node.hint))
    if len(steps) != 1:
        return None
    place = of.start or 0
    return place if may_be_none(size - _needed(place) + 1) else None


def _needed(place: int) -> int:
    """How many steps there are at least, if one is there."""
    return -place if place < 0 else place + 1
