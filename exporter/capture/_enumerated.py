"""Values of tensors that model code goes over one by one, as many as a capture does not know.

`for expert in hit.nonzero(): …` goes over what is hit. A capture goes over all that could be, as if
all were hit; `counts` sees to it that this is right. Of `torch.bincount(x, minlength=n)`, n values
are taken to be all. What numpy is asked for of whole numbers are numbers of the capture.
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

__all__ = ["Enumerated"]

_MOST = 1024  # of such values

_SELECTS = (torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere, torch.where)
_COUNTS = (torch.bincount, Tensor.bincount)
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

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _UNBINDS or func in _NUMBERS:
            return self._one_by_one(func, args, kwargs)
        result = func(*args, **kwargs)
        if func in _SELECTS and len(args) == 1:
            self._selected(result, args[0])
        elif func in _COUNTS:
            self._counted(result, kwargs.get("minlength", args[2] if len(args) > 2 else 0))
        elif func in _KEEPS and id(args[0]) in self._known:
            self._kept(result, func, args, kwargs)
        return result

    def _selected(self, result: Any, of: Tensor) -> None:
        """Of a vector, which of its places are selected."""
        if of.dim() != 1 or not isinstance(of.shape[0], int) or of.shape[0] > _MOST:
            return
        length, device = of.shape[0], of.device

        def places() -> Tensor:
            return torch.tensor(list(range(length)), device=device)

        if isinstance(result, Tensor):
            self._known[id(result)] = result, lambda: places()[:, None]
        else:
            self._known[id(result[0])] = result[0], places

    def _counted(self, result: Tensor, least: Any) -> None:
        """How often there is each of some numbers."""
        if isinstance(least, int) and 0 < least <= _MOST and isinstance(result.shape[0], SymInt):
            self._known[id(result)] = result, lambda: result[:least]

    def _kept(self, result: Any, func: Any, args: Any, kwargs: Any) -> None:
        """The same rows in another shape or type."""
        of, whole = self._known[id(args[0])]
        told = pytree.tree_leaves((args[1:], kwargs))
        if isinstance(result, Tensor) and _is_along(result, of) and all(map(_is_plain, told)):
            self._known[id(result)] = result, lambda: func(whole(), *args[1:], **kwargs)

    def _one_by_one(self, func: Any, args: Any, kwargs: Any) -> Any:
        given, *rest = args
        along = kwargs.get("dim", rest[0] if rest else 0) == 0 or func in _NUMBERS
        if id(given) in self._known and along:
            some, all_of_them = self._known[id(given)]
            whole = all_of_them()
            all_there: Any = some.shape[0] == whole.shape[0]
            if self._assume(all_there, sys._getframe(2)):
                given = whole
        if func in (Tensor.numpy, Tensor.__array__) and _has_numbers(given):
            return np.array(given.tolist(), dtype=object)
        return func(given, *rest, **kwargs)


def _is_plain(value: Any) -> bool:
    """Whether an argument is none that hangs on how many rows there are."""
    if isinstance(value, slice):
        return all(map(_is_plain, (value.start, value.stop, value.step)))
    return not isinstance(value, SymInt | Tensor)


def _is_along(result: Tensor, of: Tensor) -> bool:
    """Whether a tensor has as many rows as another, which a capture does not know the number of."""
    rows: list[Any] = [x.shape[0] for x in (result, of) if x.dim()]
    return all(isinstance(n, SymInt) for n in rows) and len({n.node.expr for n in rows}) == 1


def _has_numbers(x: Tensor) -> bool:
    return not x.is_floating_point() and not x.is_complex() and x.dtype != torch.bool
