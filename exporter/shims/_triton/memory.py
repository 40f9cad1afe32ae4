"""Tensors as a Triton kernel sees them: memory behind a pointer.

What a kernel stores is in the tensor when its launch ends: until then a tensor's memory is a value
that each store makes anew, so that a launch can be left and begun again.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from fuseport.exporter.shims._sizes import always
from fuseport.exporter.shims._triton.boxes import Box, box
from fuseport.exporter.shims._triton.conflicts import Access, are_apart, do_conflict
from fuseport.exporter.shims._triton.dtypes import DType, as_dtype
from fuseport.exporter.shims._triton.places import (
    Linear,
    Size,
    at_least,
    is_one,
    same,
    strides,
    times,
)
from fuseport.exporter.shims._triton.programs import Unknown, programs
from fuseport.exporter.shims._triton.values import Moved, Value, Within, as_value, binary

__all__ = ["Memory", "Pointer", "is_known", "optional", "pointer_of"]


class Memory:
    """The elements from a tensor's first to its last, by how far they are apart.

    Args:
        tensor: any that has no two places for one element, but for dimensions of stride 0.
        name: of the kernel's argument.
    """

    def __init__(self, tensor: Tensor, name: str) -> None:
        self.tensor, self.name = tensor, name
        self._strides = strides(tensor)
        self.is_stored = False
        self.unchanged = 0  # atomic operations in turn that changed nothing
        self._touched: list[tuple[bool, Value]] = []  # whether stored, and where, in strides
        self._accesses: list[Access] = []
        self._flat: Tensor | None = None

    @property
    def flat(self) -> Tensor:
        """Its elements, one after the other, with zeros where the tensor has none."""
        if self._flat is None:
            self._flat = self._read()
        return self._flat

    @cached_property
    def _layout(self) -> tuple[list[int], list[Size]]:
        """The dimensions that move, from the largest stride to the smallest, and the room in each
        but the first for those after it, as the last stride; no rooms where strides are no
        multiples of one another."""
        sizes, strides = self.tensor.shape, self._strides
        moving = [i for i, s in enumerate(sizes) if not is_one(s) and not same(strides[i], 0)]
        ordered: list[int] = []
        for i in moving:
            place = sum(at_least(strides[o], strides[i]) for o in ordered)
            ordered.insert(place, i)
        rooms = [times(strides[a], strides[b]) for a, b in itertools.pairwise(ordered)]
        if ordered:
            rooms.append(strides[ordered[-1]])
        for at, (above, i) in enumerate(itertools.pairwise(ordered)):
            if same(strides[above], rooms[at] * strides[i]) and always(sizes[i] <= rooms[at]):
                continue
            if not always(self._extent(ordered[at + 1 :]) <= strides[above]):
                raise Unknown(
                    f"{self.name} has the strides {tuple(strides)} for the sizes {tuple(sizes)}"
                )
            return ordered, []
        return ordered, rooms

    def _own_places(self) -> Tensor:
        """How far each element is from the first, by the dimensions that move."""
        dims = self._layout[0]
        sizes, strides = self.tensor.shape, self._strides
        each = Linear(0, tuple(strides[i] for i in dims), tuple(sizes[i] for i in dims))
        return each.tensor(self.tensor.device)

    def _read(self) -> Tensor:
        ordered, rooms = self._layout
        x = self.tensor
        for i in range(x.dim()):
            if i not in ordered:
                x = x.narrow(i, 0, 1)
        fixed = [i for i in range(x.dim()) if i not in ordered]
        x = x.permute([*fixed, *ordered]).reshape([x.shape[i] for i in ordered] or [1])
        if not ordered:
            return x
        if not rooms:
            places = self._own_places().reshape(-1)
            return x.new_zeros(self._extent()).scatter(0, places, x.reshape(-1))
        if not same(rooms[-1], 1):
            x = x.unsqueeze(-1)
        gaps = [*rooms[:-1], *([] if same(rooms[-1], 1) else [rooms[-1]])]
        widths = [
            room - size
            for room, size in zip(gaps, x.shape[len(x.shape) - len(gaps) :], strict=True)
        ]
        if not all(same(width, 0) for width in widths):
            x = F.pad(x, [n for width in reversed(widths) for n in (0, width)])
        return x.reshape(-1)

    def finish(self) -> None:
        """Writes to the tensor what has been stored."""
        if not self.is_stored:
            return
        ordered, rooms = self._layout
        sizes = self.tensor.shape
        if any(i not in ordered and not is_one(size) for i, size in enumerate(sizes)):
            raise Unknown(f"it stores to {self.name}, of which several places are one element")
        x = self.flat
        if ordered:
            if rooms:
                x = x.view([sizes[ordered[0]], *rooms])[..., 0]
                for at, i in enumerate(ordered):
                    if at and not same(sizes[i], x.shape[at]):
                        x = x.narrow(at, 0, sizes[i])
            else:
                x = x[self._own_places()]
            order = [ordered.index(i) for i in range(len(sizes)) if i in ordered]
            x = x.permute(order)
        self.tensor.copy_(x.reshape(sizes))

    def require_same(self, other: "Memory") -> None:
        """Refuses what is not as in another, of programs that ran in another order.

        Floating point numbers may differ as sums of thousands in another order do.
        """
        if not self.is_stored:
            return
        if not is_known(self.flat):
            raise Unknown("what atomic operations return is asked for where no values are known")
        x, y, near = self.flat, other.flat, 0.0
        if x.dtype.is_floating_point:
            largest = float(x.abs().nan_to_num(0, 0, 0).max())
            near = min(1e3 * torch.finfo(x.dtype).eps, 0.01) * largest
            x, y = x.to(torch.float64), y.to(torch.float64)
        if not torch.allclose(x, y, rtol=0, atol=near, equal_nan=True):
            raise Unknown(f"{self.name} hangs on the order in which its programs run")

    def is_same(self, tensor: Tensor) -> bool:
        """Whether a tensor has the same elements in the same places."""
        mine = (self.tensor.storage_offset(), *self.tensor.shape, *self.tensor.stride())
        other = (tensor.storage_offset(), *tensor.shape, *tensor.stride())
        return (
            self.tensor.dtype == tensor.dtype
            and len(mine) == len(other)
            and _storage(self.tensor) == _storage(tensor)
            and all(map(same, mine, other))
        )

    def may_overlap(self, other: "Memory") -> bool:
        """Whether another tensor may have elements of this one.

        Of the parts of one tensor, which have the same strides, it is taken that they have none in
        common.
        """
        if _storage(self.tensor) != _storage(other.tensor):
            return False
        mine, theirs = self.tensor.stride(), other.tensor.stride()
        if len(mine) == len(theirs) and all(map(same, mine, theirs)):
            return False
        return not any(
            always(a.tensor.storage_offset() + a._extent() <= b.tensor.storage_offset())
            for a, b in ((self, other), (other, self))
        )

    def _extent(self, dims: Sequence[int] | None = None) -> Size:
        """How many elements there are from the first to the last, along all or some dimensions."""
        of = range(self.tensor.dim()) if dims is None else dims
        sizes, strides = self.tensor.shape, self._strides
        return 1 + sum(strides[i] * (sizes[i] - 1) for i in of)

    # What kernels do.

    def load(self, at: Value, mask: Value | None, other: Value | None) -> Value:
        """Elements at some places.

        Args:
            at: how far they are from the first.
            mask: where there are such; everywhere by default.
            other: what there is elsewhere; 0 by default.
        """
        rank = max(v.rank for v in (at, mask, other) if v is not None)
        at = at.at_rank(rank)
        self._require_turns_apart(at, is_stored=False)
        number = 0 if other is None else other.number
        found = self._box(at, mask)
        self._note(at, mask, found, is_stored=False)
        if found is not None and number is not None:  # there are such, whoever goes this way
            return Value(found.read(self.flat, number), rank)
        index, kept = self._places(at, _of_way(mask))
        out = self.flat[index]
        if kept is not None:
            rest = 0 if other is None else other.at_rank(rank).tensor.to(out.dtype)
            out = torch.where(kept, out, rest)
        return Value(out, rank)

    def store(self, at: Value, value: Value, mask: Value | None) -> None:
        """Writes to some places.

        Args:
            at: how far they are from the first.
            value: what is written.
            mask: where; everywhere by default.
        """
        rank = max(v.rank for v in (at, mask, value) if v is not None)
        at, block = at.at_rank(rank), value.at_rank(rank).tensor.to(self.flat.dtype)
        self._require_parts(at)
        found = self._box(at, mask)
        self._note(at, mask, found, is_stored=True)
        way = _of_way(None)
        if way is not None:
            mask = _of_way(mask)
            within = self._box(at, mask) if _within(mask) else None
            found, way = (found, way) if within is None else (within, None)
        if found is not None and way is not None:  # the others leave what there is
            there = found.read(self.flat, 0)
            chosen = torch.where(way.at_rank(rank).tensor, block, there)
        else:
            chosen = block
        if found is not None and self._is_once(found, chosen):
            self._replace(found.written(self.flat, chosen))
            return
        if any(programs().strided.values()):
            raise Unknown(f"turns of a loop may store to the same places of {self.name}")
        self._replace(self._after(lambda memory, *new: memory.scatter(0, *new), at, block, mask))

    def add(self, at: Value, value: Value, mask: Value | None) -> None:
        """Adds to some places, to one several times where it is there several times."""
        rank = max(v.rank for v in (at, mask, value) if v is not None)
        block = value.at_rank(rank).tensor.to(self.flat.dtype)
        self._require_parts(at.at_rank(rank))
        self._note(at.at_rank(rank), mask, None, is_stored=True)
        index, kept = self._places(at.at_rank(rank), _of_way(mask))
        sizes = [*torch.broadcast_shapes(index.shape, block.shape, *_shapes(kept))]
        axes = programs()
        for dim, axis in enumerate(axes.at_once):  # once for each program, alike or not
            sizes[dim] = axes.grid[axis]
        if kept is not None:
            block = torch.where(kept, block, 0)
        block, index = (x.expand(sizes).reshape(-1) for x in (block, index))
        self._replace(self.flat.index_add(0, index, block))

    def extreme(self, at: Value, value: Value, mask: Value | None, by: str) -> None:
        """Replaces places by a value where that is larger, `amax`, or smaller, `amin`."""
        rank = max(v.rank for v in (at, mask, value) if v is not None)
        at, block = at.at_rank(rank), value.at_rank(rank).tensor.to(self.flat.dtype)
        self._require_parts(at)
        self._note(at, mask, None, is_stored=True)
        write = partial(_with_extremes, by)
        self._replace(self._after(write, at, block, _of_way(mask)))

    def _after(
        self, write: Callable[..., Tensor], at: Value, block: Tensor, mask: Value | None
    ) -> Tensor:
        """The memory after a block is written; what the mask leaves out goes behind the end.

        Args:
            write: the memory, places and what is written, of one dimension each → the memory after.
        """
        index, kept = self._places(at, mask)
        sizes = torch.broadcast_shapes(index.shape, block.shape, *_shapes(kept))
        block, index = (x.expand(sizes).reshape(-1) for x in (block, index))
        if kept is None:
            return write(self.flat, index, block)
        end = self.flat.numel()
        index = torch.where(kept.expand(sizes).reshape(-1), index, end)
        return write(F.pad(self.flat, (0, 1)), index, block)[:end]

    def _replace(self, flat: Tensor) -> None:
        self._flat, self.is_stored = flat, True

    def _note(self, at: Value, mask: Value | None, found: Box | None, *, is_stored: bool) -> None:
        """Keeps what is read or stored, for `has_conflicts`."""
        here = programs()
        axes = [n for n, axis in enumerate(here.at_once) if not is_one(here.grid[axis])]
        parts = None if found is None else found.parts(axes)
        is_certain = parts is not None or not axes
        if found is None and at.linear is None and len(axes) == 1:
            step = at.steps[axes[0]] if at.steps else 0
            parts = None if same(step, 0) else ((step, 0),)
        self._accesses.append(Access(is_stored, at, _of_way(mask), parts, is_certain))

    def has_conflicts(self) -> bool:
        """Whether a program may have read what another one, that runs at once, has stored."""
        here, accesses = programs(), self._accesses
        if len({access.is_stored for access in accesses}) < 2:
            return False
        if all(access.is_certain for access in accesses) and are_apart(accesses):
            return False
        sizes = [here.grid[axis] for axis in here.at_once]
        numel = self.flat.numel()
        if is_known(self.flat) and all(isinstance(size, int) for size in (*sizes, numel)):
            places = [(a.is_stored, self._places(a.at, a.mask)) for a in accesses]
            if all(is_known(index) for _, (index, _) in places):
                stored, read = ([p for is_, p in places if is_ is which] for which in (True, False))
                return do_conflict(stored, read, sizes, numel)
        return not are_apart(accesses)

    def _require_turns_apart(self, at: Value, *, is_stored: bool) -> None:
        """Refuses what one turn of a loop may have stored for another, where all are run at once:
        what is read there and stored is to be in the same places."""
        if not any(programs().strided.values()):
            return
        for stored, other in self._touched:
            a, b = at.linear, other.linear
            if stored == is_stored or (a is not None and b is not None and _are_same(a, b)):
                continue
            raise Unknown(f"turns of a loop may read of {self.name} what others have stored")
        self._touched.append((is_stored, at))

    def _require_parts(self, at: Value) -> None:
        """Refuses what each program of an axis has a place of its own for, where one program has
        the block of all of them."""
        self._require_turns_apart(at, is_stored=True)
        here, linear = programs(), at.linear
        if linear is None:
            return
        for step in (linear.steps[here.at_once.index(axis)] for axis in here.joined):
            parts = [
                s * n for s, n in zip(linear.steps, linear.sizes, strict=True) if not is_one(n)
            ]
            if not same(step, 0) and not any(same(part, step) for part in parts):
                raise Unknown(f"each of its programs stores to a place of its own in {self.name}")

    def _box(self, at: Value, mask: Value | None) -> Box | None:
        if at.linear is None or not (mask is None or mask.number is True or _within(mask)):
            return None
        linear = at.linear
        below: Sequence[Linear] = ()
        if mask is not None and isinstance(mask.of, Within):
            below = mask.at_rank(at.rank).of.below
        return box(linear, below, self.flat.numel())

    def is_once(self, at: Value, value: Value, mask: Value | None) -> bool:
        """Whether what is written to some places is known to go to a place of its own each."""
        rank = max(v.rank for v in (at, mask, value) if v is not None)
        index, kept = self._places(at.at_rank(rank), mask)
        block = value.at_rank(rank).sizes
        sizes = torch.broadcast_shapes(index.shape, block, *_shapes(kept))
        if all(map(is_one, sizes)):
            return True
        if not is_known(index) or not (kept is None or is_known(kept)):
            return False
        places = index.expand(sizes)
        places = places.reshape(-1) if kept is None else places[kept.expand(sizes)]
        return len(places.unique()) == len(places)

    def _is_once(self, found: Box, block: Tensor) -> bool:
        """Whether all that differs in what is stored is stored to a place of its own."""
        moving = {i for dim in found.dims for i in dim.of}
        return all(i in moving or is_one(size) for i, size in enumerate(block.shape))

    def _places(self, at: Value, mask: Value | None) -> tuple[Tensor, Tensor | None]:
        """Indices, 0 where there is none, and where there are some, if not everywhere.

        Raises:
            IndexError: they are beside the memory, and known.
        """
        index = at.tensor.to(torch.int64)
        kept = None if mask is None or mask.number is True else mask.at_rank(at.rank).tensor
        if kept is not None:
            index = torch.where(kept, index, 0)
        if index.numel() and is_known(index):
            low, high = (int(x) for x in torch.aminmax(index))
            if low < 0 or (high >= self.flat.numel() and (high > 0 or kept is None)):
                raise IndexError(
                    f"it reads or writes {self.name} at {low if low < 0 else high}, which has "
                    f"{self.flat.numel()} elements"
                )
        return index, kept


def _of_way(mask: Value | None) -> Value | None:
    """A mask of the programs that go the way that runs now."""
    for way in programs().ways:
        mask = way if mask is None or mask.number is True else binary("and", mask, way)
    return mask


def _with_extremes(by: str, memory: Tensor, places: Tensor, values: Tensor) -> Tensor:
    return memory.scatter_reduce(0, places, values, by)


def _are_same(a: Linear, b: Linear) -> bool:
    ours, theirs = (a.base, *a.steps, *a.sizes), (b.base, *b.steps, *b.sizes)
    return len(ours) == len(theirs) and all(map(same, ours, theirs))


def _storage(tensor: Tensor) -> int:
    at: int = tensor.untyped_storage()._cdata
    return at


def _within(mask: Value | None) -> bool:
    return mask is not None and isinstance(mask.of, Within)


def _shapes(kept: Tensor | None) -> list[torch.Size]:
    return [] if kept is None else [kept.shape]


def is_known(x: Tensor) -> bool:
    """Whether its values can be read: it is not traced."""
    return type(x) is Tensor and not isinstance(x, FakeTensor) and get_proxy_mode() is None


def optional(value: Any) -> Value | None:
    """A mask, or what stands in its place, if there is one."""
    return None if value is None else as_value(value)


def pointer_of(value: Any) -> "Pointer":
    """A pointer.

    Raises:
        Unknown: it is none.
    """
    if not isinstance(value, Pointer):
        raise Unknown(f"it reads or writes at {value!r}, which is no pointer")
    return value


@dataclass(frozen=True, eq=False, repr=False)
class Pointer(Moved):
    """A pointer, or a block of such.

    Args:
        memory: what it points into.
        at: how far from the first element.
    """

    memory: Memory
    at: Value

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.memory, binary("add", self.at, as_value(offset)))

    __radd__ = __add__

    def __repr__(self) -> str:
        return f"a pointer to {self.memory.name}"

    def __sub__(self, offset: Any) -> "Pointer":
        return Pointer(self.memory, binary("sub", self.at, as_value(offset)))

    def __getitem__(self, item: Any) -> "Pointer":
        return Pointer(self.memory, self.at[item])

    @property
    def dtype(self) -> DType:
        """Of what it points at."""
        return DType(self.memory.tensor.dtype)

    type = dtype

    @property
    def shape(self) -> tuple[Size, ...]:
        """Of the block."""
        return self.at.shape

    def to(self, dtype: Any, bitcast: bool = False) -> "Pointer":
        """Itself, as a pointer to the same.

        Raises:
            Unknown: to another dtype.
        """
        found = as_dtype(dtype)
        exact = self.dtype.torch == torch.float64  # as truth is computed
        if found is None or (found != self.dtype and not (exact and found.is_floating())):
            raise Unknown(f"a pointer to {self.dtype} is taken for one to {dtype}")
        return self

    cast = to
