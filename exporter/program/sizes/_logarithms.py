"""Whole parts of a dynamic size's logarithm: `2 ** math.ceil(math.log2(length))`.

Code makes powers of 2 of lengths so, for Fourier transforms. `math.log2` gives numbers alone, and
no file can hold torch's own logarithm of a size, or its shifts. Here a power of the size near 1
says about what it is, which a division of integers makes exact. What a file says of every size that
is made of it is parsed when that is loaded, so it is short: no minimum of many, and no maximum.
"""

import math
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import sympy  # type: ignore[import-untyped]  # it has no types
import torch
from torch import SymInt
from torch._subclasses import fake_impls
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._sympy.functions import FloorDiv, Max, PowByNatural

from fuseport.exporter.program.sizes._functions import logarithm
from fuseport.exporter.program.sizes.bounds import may_be_none, not_negative

__all__ = ["Logarithm", "beginnings_of_powers", "logarithms"]

_POWER = 2.0**-14
_SCALE = 1 / (_POWER * math.log(2))
"""(n^p - 1) / (p·log 2), with this power p, is log2(n), and for n < 2^62 up to 0.09 more."""


class Logarithm:
    """That of a size to the base 2: rounded up or down, it is a size; else a number that values
    say."""

    def __init__(self, size: SymInt) -> None:
        self._size = size

    def __ceil__(self) -> Any:
        return _rounded_up(self._size)

    def __floor__(self) -> Any:
        return _rounded_up(self._size + 1) - 1

    def __trunc__(self) -> Any:
        return self.__floor__()

    def number(self) -> Any:
        """What it is, not rounded."""
        return logarithm(self._size)

    def __int__(self) -> int:
        return int(float(self))

    def __float__(self) -> float:
        return math.log2(int(self._size))

    def ceil(self) -> Any:
        """As numpy calls it."""
        return self.__ceil__()

    def floor(self) -> Any:
        """As numpy calls it."""
        return self.__floor__()


def _as_number(function: Callable[..., Any], *, turned: bool = False) -> Callable[..., Any]:
    def computed(self: Logarithm, *others: Any) -> Any:
        numbers = [each.number() if isinstance(each, Logarithm) else each for each in others]
        given = (self.number(), *numbers)
        return function(*reversed(given) if turned else given)

    return computed


for _name in ("add", "floordiv", "mod", "mul", "pow", "sub", "truediv"):
    setattr(Logarithm, f"__{_name}__", _as_number(getattr(operator, _name)))
    setattr(Logarithm, f"__r{_name}__", _as_number(getattr(operator, _name), turned=True))
for _name in ("abs", "eq", "ge", "gt", "le", "lt", "ne", "neg", "pos"):
    setattr(Logarithm, f"__{_name}__", _as_number(getattr(operator, _name)))
Logarithm.__round__ = _as_number(round)  # type: ignore[attr-defined]
Logarithm.__bool__ = _as_number(bool)  # type: ignore[attr-defined]
Logarithm.__hash__ = object.__hash__  # type: ignore[method-assign]


def _rounded_up(size: Any) -> Any:
    if may_be_none(size):
        torch._check(size >= 1)  # of 0 there is none
    # p is that, or one less: p <= log2(n) + 0.4, and p > log2(n) - 1.
    near = torch.sym_int(torch.sym_float(size) ** _POWER * _SCALE - (_SCALE - 0.3))
    return near + (size - 1) // 2**near


@contextmanager
def logarithms() -> Iterator[None]:
    """Have `math.log2`, numpy's, `bit_length` and shifts leave dynamic sizes what they are."""
    number = math.log2

    def log2(x: Any) -> Any:
        return Logarithm(x) if isinstance(x, SymInt) else number(x)

    of_sizes: dict[str, Any] = {
        "log2": lambda size: Logarithm(size),  # as numpy calls it
        "bit_length": lambda size: _rounded_up(size + 1),
        "__lshift__": lambda size, by: size * 2**by,
        "__rshift__": lambda size, by: size // 2**by,
        "__rlshift__": lambda size, number: number * 2**size,
    }
    with (
        mock.patch.object(math, "log2", log2),
        mock.patch.multiple(SymInt, create=True, **of_sizes),
    ):
        yield


@contextmanager
def beginnings_of_powers() -> Iterator[None]:
    """Have `y[..., :length]` be of that length where y has as many as a power of 2 above it says.

    Torch has it of the smaller of both sizes, and so all that is made of it.
    """
    computed = fake_impls._compute_slice_index

    def index_of(size: Any, index: Any) -> Any:
        known = isinstance(size, SymInt) and isinstance(index, SymInt) and not_negative(index)
        if known and _is_at_most(index, size, size.node.expr):
            return index
        found = computed(size, index)
        if found is None and not any(map(free_unbacked_symbols, (size, index))):
            # From the end, or not: as in the example, and only there. Torch leaves it to values.
            found = torch.sym_max(index + size, 0) if index < 0 else torch.sym_min(index, size)
        return found

    with mock.patch.object(fake_impls, "_compute_slice_index", index_of):
        yield


def _is_at_most(index: SymInt, size: SymInt, expr: sympy.Expr) -> bool:
    """Whether an index is known to be at most a size's `expr`."""
    if isinstance(expr, Max):
        return any(_is_at_most(index, size, each) for each in expr.args)
    factor, power = expr.as_coeff_Mul()
    least = _least(power)
    if least is None or not factor.is_positive:
        return False
    env = size.node.shape_env
    return not_negative(env.create_symintnode(factor * least - index.node.expr, hint=None))


def _least(power: sympy.Expr) -> sympy.Expr | None:
    """size·2^by, which is at most 2^(p + (size - 1) // 2^p + by), which `_rounded_up` makes."""
    if not isinstance(power, PowByNatural) or power.args[0] != 2:
        return None
    for term in sympy.Add.make_args(power.args[1]):
        if isinstance(term, FloorDiv) and isinstance(term.divisor, PowByNatural):
            by = power.args[1] - term - term.divisor.args[1]
            if by.is_integer and by.is_number and term.divisor.args[0] == 2:
                return (term.base + 1) * sympy.Integer(2) ** by
    return None
