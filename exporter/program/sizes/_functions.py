"""Functions of sizes, as scores are divided by: `math.sqrt(length)`, `np.log(length)`.

Python's give numbers alone. A size to the power of 0.5 stays one in programs; of others torch has
no form, and they are numbers that a tensor's values say. The largest of some, `max(x.shape[2:])`,
is one by the sizes of the example: torch knows but the larger of two.
"""

import builtins
import functools
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import GeneratorType
from typing import Any
from unittest import mock

import torch
from torch import SymFloat, SymInt, Tensor

__all__ = ["OF_SIZES", "functions", "logarithm"]

_NAMES = (
    *("log10", "log1p", "exp", "expm1", "sin", "cos", "tan", "sinh", "cosh", "tanh"),
    *("asin", "acos", "atan", "asinh", "acosh", "atanh", "erf", "erfc", "lgamma"),
)
_OTHERS = {"arcsin": "asin", "arccos": "acos", "arctan": "atan"}
"""What numpy calls some, of those that model code has."""


def _number(function: Callable[[Tensor], Tensor], size: Any) -> Any:
    return function(torch.full((), size, dtype=torch.float64)).item()


def logarithm(size: SymInt) -> Any:
    """That of a size to the base 2, as a number."""
    return _number(torch.log2, size)


def _of_size(name: str) -> Callable[..., Any]:
    number, function = getattr(math, name), getattr(torch, name)

    def computed(x: Any, /) -> Any:
        return _number(function, x) if isinstance(x, SymInt | SymFloat) else number(x)

    return computed


def _log(x: Any, /, *base: Any) -> Any:
    return _natural(x) / _natural(*base) if base else _natural(x)


def _sqrt(x: Any, /) -> Any:
    return x**0.5 if isinstance(x, SymInt | SymFloat) else _ROOT(x)


def _isqrt(n: Any, /) -> Any:
    return torch.sym_int(n**0.5) if isinstance(n, SymInt) else _WHOLE_ROOT(n)


def _hypot(*sides: Any) -> Any:
    if any(isinstance(side, SymInt | SymFloat) for side in sides):
        return sum(side * side for side in sides) ** 0.5
    return _DISTANCE(*sides)


def _extreme(name: str, of_two: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """`max` or `min`, of whole numbers of which one is a size."""
    own = getattr(builtins, name)

    def found(*given: Any, **named: Any) -> Any:
        one = len(given) == 1 and not named
        several = one and (type(given[0]) in _SEVERAL or isinstance(given[0], torch.Size))
        items = tuple(given[0]) if several else given
        sizes = not named and any(isinstance(x, SymInt) for x in items)
        if sizes and all(isinstance(x, int | SymInt) for x in items):
            return functools.reduce(of_two, items)
        return own(items) if several else own(*given, **named)

    return found


_SEVERAL = (list, tuple, GeneratorType)
_natural = _of_size("log")
_ROOT, _WHOLE_ROOT, _DISTANCE = math.sqrt, math.isqrt, math.hypot

OF_SIZES: dict[Callable[..., Any], Callable[..., Any]] = {
    **{getattr(math, name): _of_size(name) for name in _NAMES},
    math.log: _log,
    _ROOT: _sqrt,
    _WHOLE_ROOT: _isqrt,
    _DISTANCE: _hypot,
}
"""Functions of Python's, each with one that leaves dynamic sizes what they are."""


@contextmanager
def functions() -> Iterator[None]:
    """Have Python's, and numpy's, leave dynamic sizes what they are."""
    named: dict[str, Any] = {own.__name__: instead for own, instead in OF_SIZES.items()}
    # Of what is no number of its own numpy calls a method.
    methods: dict[str, Any] = {**named, **{other: named[name] for other, name in _OTHERS.items()}}
    largest, smallest = _extreme("max", torch.sym_max), _extreme("min", torch.sym_min)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(math, **named))
        stack.enter_context(mock.patch.multiple(builtins, max=largest, min=smallest))
        for kind in (SymInt, SymFloat):
            stack.enter_context(mock.patch.multiple(kind, create=True, **methods))
        yield
