"""Integer expressions of sympy, computed step by step: in Python, or as nodes of a graph."""

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import sympy  # type: ignore[import-untyped]  # it has no types
import torch
from torch.utils._sympy import functions as of_torch

__all__ = ["Step", "Unknown", "computed", "fails", "holds", "of_integers"]

T = TypeVar("T")
Step = Callable[[Any, Any], Any]
"""Of two integers an integer, or whether something is so: a function of `operator` or torch."""

_STEPS: Mapping[Any, Step] = {
    sympy.Add: operator.add,
    sympy.Mul: operator.mul,
    of_torch.FloorDiv: operator.floordiv,
    of_torch.CleanDiv: operator.floordiv,
    of_torch.Mod: operator.mod,
    of_torch.PythonMod: operator.mod,
    sympy.Mod: operator.mod,
    sympy.Min: torch.sym_min,
    of_torch.Min: torch.sym_min,
    sympy.Max: torch.sym_max,
    of_torch.Max: torch.sym_max,
    sympy.Eq: operator.eq,
    sympy.Ne: operator.ne,
    sympy.Lt: operator.lt,
    sympy.Le: operator.le,
    sympy.Gt: operator.gt,
    sympy.Ge: operator.ge,
}


class Unknown(Exception):
    """An expression has something else in it than integers and such steps."""


def computed(
    expression: sympy.Basic,
    values: dict[sympy.Basic, T],
    number: Callable[[int], T],
    step: Callable[[Step, T, T], T],
) -> T:
    """The value of an expression.

    Args:
        expression: of integers, or a relation of two.
        values: of its symbols; those of its parts are added, so that each is computed once.
        number: the value that an integer is.
        step: does one step.

    Raises:
        Unknown: there is something else in it.
    """

    def of(part: sympy.Basic) -> T:
        if part not in values:
            values[part] = made(part)
        return values[part]

    def made(part: sympy.Basic) -> T:
        if isinstance(part, sympy.Integer):
            return number(int(part))
        if isinstance(part, sympy.Pow) and isinstance(part.exp, sympy.Integer) and part.exp > 0:
            return functools.reduce(
                functools.partial(step, operator.mul), [of(part.base)] * int(part.exp)
            )
        if isinstance(part, of_torch.ModularIndexing):
            base, divisor, modulus = map(of, part.args)
            return step(operator.mod, step(operator.floordiv, base, divisor), modulus)
        if part.func not in _STEPS:
            raise Unknown(str(part))
        arguments = [of(argument) for argument in part.args]
        return functools.reduce(functools.partial(step, _STEPS[part.func]), arguments)

    return of(expression)


def fails(condition: sympy.Basic, sizes: Mapping[sympy.Symbol, int]) -> bool:
    """Whether a condition is known not to hold at these sizes, be they some of its own.

    One that divides by a size of zero does not.
    """
    try:
        return not computed(condition, dict(sizes), int, _done)
    except ZeroDivisionError:
        return True
    except Unknown:  # sympy knows more, and takes twenty times as long
        return bool(_replaced(condition, sizes) == sympy.false)


def holds(condition: sympy.Basic, sizes: Mapping[sympy.Symbol, int]) -> bool:
    """Whether a condition holds at these sizes, which are all of its own.

    One that divides by a size of zero does not.
    """
    if isinstance(condition, sympy.And):
        return all(holds(part, sizes) for part in condition.args)
    try:
        return bool(computed(condition, dict(sizes), int, _done))
    except ZeroDivisionError:
        return False
    except Unknown:
        return bool(_replaced(condition, sizes) == sympy.true)


def _replaced(condition: sympy.Basic, sizes: Mapping[sympy.Symbol, int]) -> sympy.Basic:
    """A condition at some sizes, as far as sympy knows; one that divides by zero is false."""
    try:
        return condition.xreplace({symbol: sympy.Integer(size) for symbol, size in sizes.items()})
    except ZeroDivisionError:
        return sympy.false


def of_integers(condition: sympy.Basic) -> bool:
    """Whether `computed` can say whether a condition holds."""
    try:
        computed(condition, dict.fromkeys(condition.free_symbols, 1), int, _done)
    except Unknown:
        return False
    except ZeroDivisionError:
        return True
    return True


def _done(step: Step, a: Any, b: Any) -> Any:
    return step(a, b)
