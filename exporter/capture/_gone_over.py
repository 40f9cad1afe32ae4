"""What code goes over of a dynamic dimension of a tensor, and what it makes one tensor of again."""

import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true
from torch.utils import _pytree as pytree

from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.program.instead._parts import named

__all__ = ["JOINS", "Parts", "is_dynamic", "is_long", "joining", "lists_of", "part_of"]

_Turns = Callable[[Any, Callable[[Any], Any], FrameType], Iterator[Any]]

_UNBINDS = (Tensor.unbind, torch.unbind)  # the former, too, where a tensor is gone over
_SPLITS = (Tensor.split, torch.split)
_CHUNKS = (Tensor.chunk, torch.chunk)


def part_of(func: Any, args: Any, kwargs: Any) -> tuple[int, bool] | None:
    """The dimension that a call takes apart into parts of one, if that is dynamic, and whether
    they keep it."""
    if func in _UNBINDS:
        given, kept = named(("input", "dim"), args, kwargs), False
    elif func in _SPLITS:
        given, kept = named(("tensor", "split_size", "dim"), args, kwargs), True
        size = given.pop("split_size", given.pop("split_size_or_sections", None))
        if type(size) is not int or size != 1:
            return None
    elif func in _CHUNKS:
        given, kept = named(("input", "chunks", "dim"), args, kwargs), True
        size = given["input"].shape[given.get("dim", 0)]
        count = given.pop("chunks", None)
        if not is_dynamic(size) or count is None or not statically_known_true(count == size):
            return None
    else:
        return None
    x: Any = given.get("input", given.get("tensor"))
    dim = given.get("dim", 0)
    return (dim % x.dim(), kept) if isinstance(dim, int) and is_long(x, dim) else None


def is_long(x: Any, dim: int) -> bool:
    """Whether something is a tensor with a dimension that is dynamic."""
    return isinstance(x, Tensor) and bool(x.dim()) and is_dynamic(x.shape[dim])


def is_dynamic(size: Any) -> bool:
    """Whether it is a size of the inputs, and does not hang on values."""
    return isinstance(size, SymInt) and not bool(free_unbacked_symbols(size))


def _refused(*_: Any) -> Any:
    raise ExportFailed("parts of a dynamic dimension are compared, or repeated: go over them")


class Parts(tuple[Tensor, ...]):
    """What `unbind` gives, or `split` or `chunk` into parts of one: what goes over them is a loop.

    A tuple, or torch's functions would not take it: of the whole, which is never to be seen.

    Args:
        turns: what goes round one, of a number of turns, what each has, and the frame it is in.
        x: what is taken apart.
        dim: of it.
        kept: whether parts have that dimension, of size 1.
    """

    def __new__(cls, turns: _Turns, x: Tensor, dim: int, kept: bool) -> "Parts":
        made = super().__new__(cls, (x,))
        made._turns, made._x, made._dim, made._kept = turns, x, dim, kept
        return made

    _turns: _Turns
    _x: Tensor
    _dim: int
    _kept: bool

    def __iter__(self) -> Iterator[Tensor]:
        return self._turns(self.count_of_all, self._part, sys._getframe(1))

    def __reversed__(self) -> Iterator[Tensor]:
        last = self.count_of_all - 1
        return self._turns(self.count_of_all, lambda at: self._part(last - at), sys._getframe(1))

    def __len__(self) -> int:  # Python asks it unasked, too, of what it makes a list of
        raise TypeError("how many parts there are is no number")

    def __bool__(self) -> bool:
        return bool(self.count_of_all != 0)

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            return self._part(index)
        x = self._x[(*(slice(None) for _ in range(self._dim)), index)]
        return Parts(self._turns, x, self._dim, self._kept)

    def __add__(self, others: Any) -> Any:
        return (*self, *others)

    def __radd__(self, others: Any) -> Any:
        return (*others, *self)

    @property
    def count_of_all(self) -> Any:
        """How many there are."""
        return self._x.shape[self._dim]

    def _part(self, at: Any) -> Tensor:
        part = self._x.select(self._dim, at)
        return part.unsqueeze(self._dim) if self._kept else part

    def stacked(self) -> Tensor:
        """All of them: (count, …)."""
        whole = self._x.movedim(self._dim, 0)
        return whole.unsqueeze(1 + self._dim) if self._kept else whole


for _name in ("__contains__", "__eq__", "__hash__", "__mul__", "__rmul__", "count", "index"):
    setattr(Parts, _name, _refused)

JOINS = (torch.stack, torch.cat, torch.concat, torch.concatenate)

_BY_RANK: dict[Any, tuple[Callable[[Tensor], Tensor], int]] = {
    torch.vstack: (torch.atleast_2d, 0),
    torch.row_stack: (torch.atleast_2d, 0),
    torch.hstack: (torch.atleast_1d, 1),
    torch.dstack: (torch.atleast_3d, 2),
}


def joining(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """A call that joins tensors, as one of `JOINS`; others as they are, but for `Parts`, which go
    over them."""
    given = named(("tensors",), args, kwargs)
    if func not in JOINS:
        args, kwargs = pytree.tree_map_only(Parts, list, (args, kwargs))
    if func not in _BY_RANK or len(given) != 1:
        return func, args, kwargs
    ranked, dim = _BY_RANK[func]
    tensors = [ranked(each) for each in given["tensors"]]
    return torch.cat, (tensors, min(dim, tensors[0].dim() - 1)), {}


def lists_of(func: Any, args: Any, kwargs: Any) -> tuple[Parts | Sequence[Tensor], int] | None:
    """The tensors that one of `JOINS` is given, and the dimension; None where it is called in
    another way."""
    given = named(("tensors", "dim"), args, kwargs)
    tensors, dim = given.pop("tensors", None), given.pop("dim", given.pop("axis", 0))
    known = isinstance(tensors, Parts) or (isinstance(tensors, list | tuple) and tensors)
    if given or not known or not isinstance(dim, int):
        return None
    return tensors, dim % (tensors[0].dim() + (func is torch.stack))
