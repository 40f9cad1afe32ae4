"""What is known of sizes in a capture: whether they may be 0, and which of them are one."""

import itertools
from collections.abc import Mapping
from typing import Any

import sympy  # type: ignore[import-untyped]  # it has no types
import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

__all__ = ["may_be_none", "may_be_zero", "not_negative", "of_inputs"]


def not_negative(size: int | torch.SymInt, least: int = 0) -> bool:
    """Whether a number made of sizes is known to be zero or more, sizes being `least` or more."""
    if isinstance(size, int):
        return size >= 0
    env = size.node.shape_env
    if env is None:
        return False
    return bool(_bounds(size, dict.fromkeys(size.node.expr.free_symbols, least)).lower >= 0)


def may_be_none(size: int | torch.SymInt) -> bool:
    """Whether a size may be 0 where no input has one of 0: it hangs on values, or is `s0 - 1`."""
    if isinstance(size, int):
        return size == 0
    if size.node.shape_env is None:
        return True
    by_values = free_unbacked_symbols(size)
    least = {s: 0 if s in by_values else 1 for s in size.node.expr.free_symbols}
    return bool(_bounds(size, least).lower < 1)


def may_be_zero(number: Any) -> bool:
    """Whether a number made of sizes may be 0 where no input has one of 0."""
    if not isinstance(number, torch.SymInt | torch.SymFloat):
        return bool(number == 0)
    by_values = free_unbacked_symbols(number)
    least = {s: 0 if s in by_values else 1 for s in number.node.expr.free_symbols}
    return bool(0 in _bounds(number, least))


def _bounds(size: Any, least: Mapping[sympy.Symbol, int]) -> ValueRanges[Any]:
    """Between what a number made of sizes lies, where each of these is `least` or more."""
    env = size.node.shape_env
    known = {symbol: env.bound_sympy(symbol) for symbol in least}
    given = {
        s: ValueRanges(max(r.lower, least[s]), max(r.upper, least[s])) for s, r in known.items()
    }
    return bound_sympy(size.node.expr, given)


def of_inputs(size: Any) -> Any:
    """A size that hangs on values, as one that does not, where a trace has noted that it is that.

    Of the parts that rows are sorted into, `u0 + u1`, there are as many as of rows.
    """
    if not isinstance(size, torch.SymInt) or not free_unbacked_symbols(size):
        return size
    env, expr = size.node.shape_env, size.node.expr
    for noted in itertools.chain(*env.deferred_runtime_asserts.values()):
        if isinstance(noted.expr, sympy.Eq) and expr in noted.expr.args:
            (other,) = {*noted.expr.args} - {expr} or {expr}
            if not free_unbacked_symbols(other):
                return int(other) if other.is_number else env.create_symintnode(other, hint=None)
    return size
