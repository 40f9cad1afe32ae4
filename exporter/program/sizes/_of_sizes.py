"""Integers that are all one size: `torch.ones(batch, dtype=torch.long) * length`.

What code reads out of them, as `lengths.max().item()`, is that size: to a capture it would be a
number that hangs on values. A tensor keeps what it is for as long as nothing else is called with
it, which may write to it, or give a view of it that is written to. What a turn of a loop has made
goes into the mark of its end, so that what is counted in the few turns of a capture is no size.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils import _pytree as pytree

__all__ = ["forget", "note", "read", "taken"]

Size = int | SymInt

_KEPT = "_fuseport_size"

_MADE = {
    **dict.fromkeys((torch.zeros, torch.zeros_like, Tensor.new_zeros), 0),
    **dict.fromkeys((torch.ones, torch.ones_like, Tensor.new_ones), 1),
}
_FILLED = {torch.full: 1, torch.full_like: 1, Tensor.new_full: 2}  # which argument says by what


def _turned(a: Size, b: Size) -> Size:
    return b - a


_COMPUTED: dict[Any, Callable[[Size, Size], Size]] = {
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), operator.add),
    **dict.fromkeys((torch.sub, Tensor.sub, Tensor.__sub__), operator.sub),
    **dict.fromkeys((torch.rsub, Tensor.__rsub__), _turned),
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__), operator.mul),
}
_ALIKE = (torch.max, torch.min, torch.amax, torch.amin, Tensor.max, Tensor.min, torch.clone)
_SAME = (*_ALIKE, Tensor.amax, Tensor.amin, Tensor.clone)

_PROPERTIES: tuple[Any, ...] = (Tensor.shape, Tensor.dtype, Tensor.device, Tensor.ndim)
_READ = (Tensor.item, Tensor.dim, Tensor.size, Tensor.numel, *(p.__get__ for p in _PROPERTIES))
_BY_FLOOR = (torch.floor_divide, Tensor.floor_divide, Tensor.__floordiv__)
_BY_MODE = (torch.div, torch.divide, Tensor.div, Tensor.divide)
_ONLY_READ = {*_COMPUTED, *_BY_FLOOR, *_BY_MODE, *_SAME, *_READ}

_TAKE_NUMBERS = (torch.arange, torch.istft, Tensor.istft, torch.zeros, torch.ones, torch.full)
_MAKERS = (Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_empty)
_TAKE_SIZES = (*_MAKERS, Tensor.view, Tensor.reshape, torch.reshape, Tensor.expand, Tensor.repeat)
"""Of what comes first, whatever that is."""


def read(func: Any, args: tuple[Any, ...]) -> Size | None:
    """The number that a call is for, if that is known to be a size."""
    return _known(args[0]) if func is Tensor.item and not args[0].dim() else None


def taken(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a call, in which sizes are no tensors where it takes numbers."""
    if func not in _TAKE_NUMBERS and func not in _TAKE_SIZES:
        return args, kwargs

    def number(given: Any) -> Any:
        size = _known(given) if isinstance(given, Tensor) and not given.dim() else None
        return given if size is None else size

    kept = args[: func in _TAKE_SIZES]
    found, named = pytree.tree_map(number, (args[len(kept) :], kwargs))
    return (*kept, *found), named


def forget(func: Any, args: Any, kwargs: Any) -> None:
    """What is done when something is called with these arguments."""
    if torch.compiler.is_dynamo_compiling() or (func in _ONLY_READ and "out" not in kwargs):
        return
    for given in pytree.tree_leaves((args, kwargs)):
        if isinstance(given, Tensor):
            vars(given).pop(_KEPT, None)


def note(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], made: Any) -> None:
    """Keeps what a call has made, if all of it is a size that is known."""
    if torch.compiler.is_dynamo_compiling() or not isinstance(made, Tensor):
        return
    if made.dtype != torch.int64 or "out" in kwargs:
        return
    size: Any = None
    if func in _MADE:
        size = _MADE[func]
    elif func in _FILLED:
        place = _FILLED[func]
        size = args[place] if len(args) > place else kwargs.get("fill_value")
    elif func in _SAME and len(args) == 1 and not kwargs:
        size = _known(args[0])
    elif func in _COMPUTED and len(args) == 2 and not kwargs:
        a, b = (_known(given) for given in args)
        size = None if a is None or b is None else _COMPUTED[func](a, b)
    elif func in _BY_FLOOR or func in _BY_MODE:
        mode = {} if func in _BY_MODE else {"rounding_mode": "floor"}
        size = _quotient(args, **mode, **kwargs)
    if type(size) in (int, SymInt):
        vars(made)[_KEPT] = size


def _quotient(
    args: tuple[Any, ...], rounding_mode: str | None = None, **others: Any
) -> Size | None:
    """That of two sizes, rounded; None where it is no size, or where it may be below zero."""
    a, b = (*map(_known, args), None, None)[:2]
    if others or rounding_mode is None or a is None or b is None:
        return None
    both = statically_known_true(a >= 0) and statically_known_true(b > 0)
    return a // b if both else None


def _known(given: Any) -> Size | None:
    size: Size | None = None
    if type(given) in (int, SymInt):
        size = given
    elif isinstance(given, Tensor) and not torch.compiler.is_dynamo_compiling():
        size = vars(given).get(_KEPT)
    return size
