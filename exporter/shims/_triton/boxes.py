"""Memory that a block of linear offsets points at, read and written as a view.

A pointer `base + row * stride + column` under a mask `column < n` is a box in memory: rows of
`stride` elements, of each of which there are `n`. Reading it is a `view`, a `narrow` and a `pad`,
which every format has, and which differentiates to the same.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch.nn.functional as F
from torch import Tensor

from fuseport.exporter.shims._sizes import always
from fuseport.exporter.shims._triton.places import Linear, Size, at_least, same, times

__all__ = ["Box", "box"]


@dataclass(frozen=True)
class _Dim:
    """A dimension of a box.

    Args:
        of: the block's dimensions that it is made of, one within the other.
        sizes: of these.
        stride: from one place to the next, in elements.
        start, stop: the places that the mask leaves.
        shift: of the first place, from that of the room that the dimension has.
    """

    of: tuple[int, ...]
    sizes: tuple[Size, ...]
    stride: Size
    start: Size
    stop: Size
    shift: Size = 0

    @property
    def size(self) -> Size:
        size: Size = 1
        for factor in self.sizes:
            size = size * factor
        return size


@dataclass(frozen=True)
class Box:
    """Where in memory the places of a block are.

    Args:
        base: where the first dimension's room begins.
        within: what is left of the offset of the first place, within the smallest stride.
        dims: from the largest stride to the smallest.
        rooms: for each dimension but the first, how many places of it the one before has room for;
            and, last, how many elements the smallest stride has.
        rank: of the block, with the axes of programs.
        sizes: of the block.
    """

    base: Size
    within: Size
    dims: tuple[_Dim, ...]
    rooms: tuple[Size, ...]
    rank: int
    sizes: tuple[Size, ...]

    def read(self, flat: Tensor, other: float) -> Tensor:
        """The block, `other` where the mask leaves nothing; 1 in dimensions that are all alike.

        Args:
            flat: the memory, of one dimension.
            other: a number.
        """
        part = self._window(flat)
        widths: list[Size] = []
        for dim in reversed(self.dims):
            widths += [dim.start, dim.size - dim.stop]
        if not all(same(width, 0) for width in widths):
            part = F.pad(part, widths, value=other)
        order = [i for dim in self.dims for i in dim.of]
        part = part.reshape([size for dim in self.dims for size in dim.sizes])
        part = part.permute(sorted(range(len(order)), key=order.__getitem__))
        there = {i: size for dim in self.dims for i, size in zip(dim.of, dim.sizes, strict=True)}
        return part.reshape([there.get(i, 1) for i in range(self.rank)])

    def written(self, flat: Tensor, block: Tensor) -> Tensor:
        """The memory with a block in it.

        Args:
            flat: the memory before.
            block: of sizes that broadcast to those of the pointer.
        """
        there = {i: size for dim in self.dims for i, size in zip(dim.of, dim.sizes, strict=True)}
        block = block.expand([there.get(i, 1) for i in range(self.rank)])
        kept = [i for i in range(self.rank) if i in there]
        block = block.reshape([there[i] for i in kept])
        block = block.permute([kept.index(i) for dim in self.dims for i in dim.of])
        block = block.reshape([dim.size for dim in self.dims])
        for at, dim in enumerate(self.dims):
            if not (same(dim.start, 0) and same(dim.stop, dim.size)):
                block = block.narrow(at, dim.start, dim.stop - dim.start)
        if self._is_all(flat):
            return block.reshape(-1)
        missing = self._span() + self.base - flat.numel()
        new = flat.clone() if always(missing <= 0) else F.pad(flat, (0, missing))
        self._window(new).copy_(block)
        return new if always(missing <= 0) else new[: flat.numel()]

    def parts(self, axes: Sequence[int]) -> tuple[tuple[Size, Size], ...] | None:
        """The parts of the memory that programs have for themselves, see `conflicts`; None where
        they are not known to have such.

        Args:
            axes: of programs, the dimensions of more than one.
        """
        found = []
        rooms = (0, *self.rooms)
        for axis in axes:
            at = next((n for n, dim in enumerate(self.dims) if dim.of[:1] == (axis,)), None)
            if at is None or not same(self.base, 0) or not same(self.dims[at].shift, 0):
                return None
            inner: Size = 1
            for size in self.dims[at].sizes[1:]:
                inner = inner * size
            found.append((self.dims[at].stride * inner, rooms[at]))
        return tuple(found)

    def _is_all(self, flat: Tensor) -> bool:
        """Whether the places are those of all of the memory, in its order."""
        return (
            same(self.base, 0)
            and same(self._span(), flat.numel())
            and all(same(dim.shift, 0) for dim in self.dims)
            and same(self.rooms[-1], 1)
            and all(same(dim.start, 0) for dim in self.dims)
            and all(map(same, (dim.stop for dim in self.dims[1:]), self.rooms))
        )

    def _span(self) -> Size:
        """How many elements there are from the base to the end of the last row."""
        return self.dims[0].stride * (self.dims[0].stop + self.dims[0].shift)

    def _window(self, flat: Tensor) -> Tensor:
        """A view of what the mask leaves, without dimensions that are all alike."""
        if not same(self.base, 0):
            flat = flat.narrow(0, self.base, flat.numel() - self.base)
        missing = self._span() - flat.numel()
        if not same(missing, 0):  # the rest of the last row, or less than all rows
            known = always(missing <= 0)
            flat = flat.narrow(0, 0, self._span()) if known else F.pad(flat, (0, missing))
        first = self.dims[0]
        rooms = [first.stop + first.shift, *self.rooms]
        part = flat.view(rooms)[..., self.within]
        for at, (dim, room) in enumerate(zip(self.dims, rooms, strict=False)):
            start, size = dim.shift + dim.start, dim.stop - dim.start
            if not (same(start, 0) and same(size, room)):
                part = part.narrow(at, start, size)
        return part


def box(at: Linear, below: Sequence[Linear], numel: Size) -> Box | None:
    """The box of a pointer under a mask; None where it is none, or is not known to be one.

    Args:
        at: the offsets, in elements.
        below: the mask: each of these is below 0.
        numel: how many elements the memory has.
    """
    below = [limit for limit in below if not always(limit.last() < 0)]
    moving = [i for i, step in enumerate(at.steps) if not same(step, 0)]
    if any(not same(s, 0) for b in below for i, s in enumerate(b.steps) if i not in moving):
        return None
    dims = _merged([_Dim((i,), (at.sizes[i],), at.steps[i], 0, at.sizes[i]) for i in moving], below)
    for limit in below:
        found = _limited(dims, limit)
        if found is None:
            return None
        dims = found
    if not dims:
        dims = [_Dim((), (), 1, 0, 1)]
    ordered = _by_stride(dims)
    if ordered is None:
        return None
    rooms = [times(a.stride, b.stride) for a, b in itertools.pairwise(ordered)]
    rooms.append(ordered[-1].stride)
    for above, room, dim in zip(ordered, rooms, ordered[1:], strict=False):
        if not same(above.stride, room * dim.stride) or not always(dim.stop <= room):
            return None
    if not always(at.base >= 0):
        return None
    end = at.base + sum(dim.stride * (dim.stop - 1) for dim in ordered)
    if always(end >= numel) and all(always(dim.stop > dim.start) for dim in ordered):
        return None  # whoever gathers says so
    base, within, shifted = _shifted(at.base, ordered, rooms)
    return Box(base, within, tuple(shifted), tuple(rooms), len(at.sizes), at.sizes)


def _shifted(
    base: Size, dims: Sequence[_Dim], rooms: Sequence[Size]
) -> tuple[Size, Size, Sequence[_Dim]]:
    """The offset of the first place, as places in each dimension, if all stay in their rooms."""
    rest, moved = base, []
    for dim, room in zip(dims, (None, *rooms[:-1]), strict=True):
        shift: Size = 0
        if type(rest) is type(dim.stride) is int:
            shift, rest = divmod(rest, dim.stride)
        if room is not None and not always(dim.stop + shift <= room):
            return base, 0, dims
        moved.append(replace(dim, shift=shift))
    return (0, rest, moved) if always(rest < rooms[-1]) else (base, 0, dims)


def _merged(dims: list[_Dim], below: Sequence[Linear]) -> list[_Dim]:
    """With `program * BLOCK + place` as one dimension, where masks have it so, too."""
    for outer in dims:
        for inner in dims:
            (first,), (second,) = outer.of[:1], inner.of[:1]
            if (
                outer is not inner
                and len(outer.of) == len(inner.of) == 1
                and same(outer.stride, inner.stride * inner.size)
                and all(same(b.steps[first], b.steps[second] * inner.size) for b in below)
            ):
                sizes = (*outer.sizes, *inner.sizes)
                both = _Dim((first, second), sizes, inner.stride, 0, outer.size * inner.size)
                return _merged([both if d is outer else d for d in dims if d is not inner], below)
    return dims


def _limited(dims: list[_Dim], limit: Linear) -> list[_Dim] | None:
    """With one more limit; None where it is not one of a single dimension."""
    touched = [d for d in dims if not all(same(limit.steps[i], 0) for i in d.of)]
    if len(touched) != 1:
        return None
    (dim,) = touched
    step = limit.steps[dim.of[-1]]
    if same(step, -1):  # base - place < 0: the place is above the base
        start = limit.base + 1
        known = always(start >= 0) and always(start <= dim.size)
        moved = replace(dim, start=start) if known and same(dim.start, 0) else None
    elif always(step > 0):
        stop = -limit.base if same(step, 1) else -(limit.base // step)  # rounded up
        if same(stop, dim.stop):
            return dims
        moved = replace(dim, stop=stop) if _ends(dim, stop) and same(dim.stop, dim.size) else None
    else:
        moved = None
    if moved is None or not always(moved.start <= moved.stop):
        return None
    return [moved if d is dim else d for d in dims]


def _ends(dim: _Dim, stop: Size) -> bool:
    """Whether a dimension is known to reach as far."""
    if always(stop <= dim.size):
        return True
    # As many programs as there are blocks in it.
    return len(dim.sizes) == 2 and same(dim.sizes[0], -(-stop // dim.sizes[1]))


def _by_stride(dims: list[_Dim]) -> list[_Dim] | None:
    """From the largest stride to the smallest; None where that is not known."""
    ordered: list[_Dim] = []
    for dim in dims:
        if not always(dim.stride > 0):
            return None
        place = 0
        for other in ordered:
            if at_least(other.stride, dim.stride):
                place += 1
            elif not at_least(dim.stride, other.stride):
                return None
        ordered.insert(place, dim)
    return ordered
