"""Which sizes torch has to fix, by the equations and congruences that a trace holds for."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import sympy  # type: ignore[import-untyped]  # it has no types
from torch.fx.experimental.symbolic_shapes import DimConstraints

__all__ = ["what_fixes_sizes"]

_solve_all: Callable[[Any], None] = DimConstraints.solve


@contextmanager
def what_fixes_sizes() -> Iterator[None]:
    """Without the equations that sympy cannot solve, or that are true of every size.

    A height that is 16 times its half divided by 8 is such a one: true of every 16th, it fixes
    none. It is among the guards of the program as others are.
    """
    with mock.patch.object(DimConstraints, "solve", _solve):
        yield


def _solve(constraints: Any) -> None:
    known = constraints._univariate_inequalities
    for size in list(constraints._symbols_with_equalities):
        solved = {expr for expr in known[size] if _tells(expr, size)}
        known[size] = solved
        if not any(isinstance(expr, sympy.Eq) for expr in solved):
            constraints._symbols_with_equalities.discard(size)
    for size, found in constraints._congruences.items():  # torch takes a sum of some to pieces
        constraints._congruences[size] = {each for each in found if isinstance(each, sympy.Mod)}
    _solve_all(constraints)


def _tells(expr: sympy.Basic, size: sympy.Symbol) -> bool:
    try:
        return sympy.reduce_inequalities([expr], size) is not sympy.true
    except NotImplementedError:
        return False
