"""Values of tensors that model code goes over one by one, as many as a capture does not know.

`for expert in hit.nonzero(): …` goes over what is hit. A capture goes over all that could be, as if
all were hit; `counts` sees to it that this is right. How many could be is known of a vector's
places, of `torch.bincount(x, minlength=n)`, and of what `topk` and the like choose among n values.
What numpy is asked for of whole numbers are numbers of the capture.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import SymBool, SymInt, Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fuseport.exporter.program.sizes.listed import Listed

__all__ = ["Enumerated"]

_MOST = 1024  # of such values

_SELECTS = (torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere, torch.where)
_COUNTS = (torch.bincount, Tensor.bincount)
_DIFFERENT = (torch.unique, Tensor.unique)
# They tell which values of a dimension: where that is among the arguments, and which it is unasked.
_CHOOSE: dict[Any, tuple[int, int | None]] = {
    **dict.fromkeys((torch.topk, Tensor.topk), (2, -1)),
    **dict.fromkeys((torch.sort, Tensor.sort, torch.argsort, Tensor.argsort), (1, -1)),
    **dict.fromkeys((torch.max, Tensor.max, torch.min, Tensor.min), (1, None)),
    **dict.fromkeys((torch.argmax, Tensor.argmax, torch.argmin, Tensor.argmin), (1, None)),
}
_KEEPS = (
    *(Tensor.squeeze, torch.squeeze, Tensor.flatten, torch.flatten, Tensor.reshape, Tensor.view),
    *(Tensor.__getitem__, Tensor.to, Tensor.cpu, Tensor.long, Tensor.int, Tensor.detach),
)
_UNBINDS = (Tensor.unbind, torch.unbind)
_NUMBERS = (Tensor.tolist, Tensor.numpy, Tensor.__array__)


class Enumerated(TorchFunctionMode):
    """Has model code go over all there could be.

    Args:
        assume: takes a condition for true, if it may, at a place in model code; whether it did.
    """

    def __init__(self, assume: Callable[[SymBool, FrameType], bool]) -> None:
        super().__init__()
        self._assume = assume
        # By a tensor's id: itself, which keeps that id, and what it is where all is selected.
        self._known: dict[int, tuple[Tensor, Callable[[], Tensor]]] = {}
        self._always: set[int] = set()  # of them, those that are that always
        # By a tensor's id: itself, and how many values from 0 on there could be in it.
        self._below: dict[int, tuple[Tensor, int]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not args:  # all by name, which few do
            return func(**kwargs)
        if func in _UNBINDS or func in _NUMBERS:
            return self._one_by_one(func, args, kwargs)
        if func is Tensor.__getitem__:
            args = (args[0], _index(args[1]))
        result = func(*args, **kwargs)
        if _writes(func):
            self._known.pop(id(args[0]), None)
            self._below.pop(id(args[0]), None)
        elif func in _SELECTS and len(args) == 1:
            self._selected(result, args[0])
        elif func in _COUNTS:
            self._counted(result, func, args, kwargs)
        elif func in _DIFFERENT and id(args[0]) in self._below:
            if isinstance(result, Tensor) and result.dim() == 1:
                _, most = self._below[id(args[0])]
                self._known[id(result)] = result, lambda: _places(most, result)
        elif func in _CHOOSE:
            self._chosen(result, args, kwargs.get("dim", _get(args, *_CHOOSE[func])))
        elif func in _KEEPS and isinstance(result, Tensor) and not _is_reread(func, args):
            if id(args[0]) in self._known:
                self._kept(result, func, args, kwargs)
            if id(args[0]) in self._below:
                self._below[id(result)] = result, self._below[id(args[0])][1]
        return result

    def _selected(self, result: Any, of: Tensor) -> None:
        """Of a vector, which of its places are selected."""
        if of.dim() != 1 or not isinstance(of.shape[0], int) or of.shape[0] > _MOST:
            return
        length = of.shape[0]
        if isinstance(result, Tensor):
            self._known[id(result)] = result, lambda: _places(length, result)[:, None]
        else:
            self._known[id(result[0])] = result[0], lambda: _places(length, result[0])

    def _chosen(self, result: Any, args: Any, dim: Any) -> None:
        """Which of the values of a dimension, if that is not dynamic."""
        indices = result if isinstance(result, Tensor) else getattr(result, "indices", None)
        if isinstance(indices, Tensor) and isinstance(dim, int) and args[0].dim():
            size = args[0].shape[dim]
            if isinstance(size, int) and size <= _MOST and not indices.is_floating_point():
                self._below[id(indices)] = indices, size

    def _counted(self, result: Tensor, func: Any, args: Any, kwargs: Any) -> None:
        """How often there is each of some numbers."""
        least = kwargs.get("minlength", _get(args, 2, 0))
        _, most = self._below.get(id(args[0]), (None, 0))
        if isinstance(least, int) and 0 < max(least, most) <= _MOST:
            weights, count = kwargs.get("weights", _get(args, 1, None)), max(least, most)
            self._known[id(result)] = result, lambda: func(args[0], weights, count)[:count]
            if 0 < most <= least:
                self._always.add(id(result))

    def _kept(self, result: Tensor, func: Any, args: Any, kwargs: Any) -> None:
        """The same rows in another shape or type."""
        of, whole = self._known[id(args[0])]
        told = pytree.tree_leaves((args[1:], kwargs))
        if _is_along(result, of) and all(map(_is_plain, told)):
            self._known[id(result)] = result, lambda: func(whole(), *args[1:], **kwargs)

    def _one_by_one(self, func: Any, args: Any, kwargs: Any) -> Any:
        given, *rest = args
        along = kwargs.get("dim", rest[0] if rest else 0) == 0 or func in _NUMBERS
        if id(given) in self._known and along:
            some, all_of_them = self._known[id(given)]
            whole = all_of_them()
            all_there: Any = some.shape[0] == whole.shape[0]
            always = all_there is True or id(some) in self._always
            may_be = isinstance(all_there, SymBool)
            if always or (may_be and self._assume(all_there, sys._getframe(2))):
                given = whole
        if func in (Tensor.numpy, Tensor.__array__) and _has_numbers(given):
            numbers = given.tolist()
            return numbers if isinstance(numbers, Listed) else np.array(numbers, dtype=object)
        return func(given, *rest, **kwargs)


def _index(index: Any) -> Any:
    """One that torch takes, where an array of numpy holds numbers of the capture."""
    if isinstance(index, tuple):
        return tuple(map(_index, index))
    if not isinstance(index, np.ndarray) or index.dtype != object:
        return index
    numbers = [torch.scalar_tensor(number, dtype=torch.int64) for number in index.flat]
    return torch.stack(numbers).reshape(index.shape) if numbers else index


def _writes(func: Any) -> bool:
    """Whether it changes its first argument."""
    name = str(getattr(func, "__name__", ""))
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name == "__setitem__" or (name.startswith("__i") and name != "__invert__")


def _is_reread(func: Any, args: Any) -> bool:
    """Whether it takes the same bytes for numbers of another type."""
    return func is Tensor.view and any(isinstance(each, torch.dtype) for each in args[1:])


def _places(count: int, like: Tensor) -> Tensor:
    """0, 1, … as many."""
    return torch.tensor(list(range(count)), device=like.device)


def _get(arguments: Any, place: int, otherwise: Any) -> Any:
    return arguments[place] if len(arguments) > place else otherwise


def _is_plain(value: Any) -> bool:
    """Whether an argument is none that hangs on how many rows there are."""
    if isinstance(value, slice):
        return all(map(_is_plain, (value.start, value.stop, value.step)))
    return not isinstance(value, SymInt | Tensor)


def _is_along(result: Tensor, of: Tensor) -> bool:
    """Whether a tensor has as many rows as another, which a capture does not know the number of."""
    rows: list[Any] = [x.shape[0] if x.dim() else None for x in (result, of)]
    return all(isinstance(n, SymInt) for n in rows) and len({n.node.expr for n in rows}) == 1


def _has_numbers(x: Tensor) -> bool:
    return not x.is_floating_point() and not x.is_complex() and x.dtype != torch.bool
