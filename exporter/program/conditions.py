"""What torch took for granted of a program's sizes in its capture.

A convolution needs a window's length; a network that halves and doubles a length may need an even
one; and torch takes a size of 2 or more for granted in places where it need not.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import sympy  # type: ignore[import-untyped]  # it has no types
from torch.utils._sympy.value_ranges import ValueRanges

from fuseport.exporter.program import Program, shape_env

__all__ = ["admits", "forget", "in_words", "violated"]


def admits(program: Program, sizes: Mapping[str, int]) -> bool:
    """Whether the program holds for these sizes of its dynamic dimensions, as far as known."""
    return next(_wrong(program, _named(program, sizes), sizes), None) is None


def violated(program: Program, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """What was taken for granted, and is not so at these sizes, in terms of the dimensions."""
    named = _named(program, sizes)
    called = {
        symbol: sympy.Symbol(name, integer=True, positive=True) for symbol, name in named.items()
    }
    wrong = _wrong(program, named, sizes)
    return tuple(dict.fromkeys(in_words(expr.xreplace(called)) for expr in wrong))


def forget(program: Program, sizes: Mapping[str, int]) -> Callable[[], None]:
    """Let go of what is not so at these sizes, in the program and in all of the same capture.

    Returns:
        What takes that back.
    """
    env, ranges = shape_env(program.exported), program.exported.range_constraints
    values = {symbol: sizes[name] for symbol, name in _named(program, sizes).items()}
    before = list(env.guards), dict(ranges), dict(env.var_to_range)

    def become(guards: list[Any], *known: Mapping[Any, Any]) -> None:
        env.guards[:] = guards
        for current, wanted in zip((ranges, env.var_to_range), known, strict=True):
            current.clear()
            current.update(wanted)

    def widened(known: Mapping[Any, Any]) -> dict[Any, Any]:
        return {
            symbol: found
            if symbol not in values
            else found | ValueRanges(values[symbol], values[symbol])
            for symbol, found in known.items()
        }

    kept = [guard for guard in env.guards if guard.expr.xreplace(values) != sympy.false]
    become(kept, widened(ranges), widened(env.var_to_range))
    return lambda: become(*before)


def in_words(condition: sympy.Basic) -> str:
    """A condition on sizes, which are positive, as short as can be."""
    if not isinstance(condition, sympy.core.relational.Relational):
        return str(condition)
    left, right = condition.lhs, condition.rhs
    # 16*batch*length != 16*length is batch != 1.
    if right.is_positive and not sympy.denom(ratio := sympy.cancel(left / right)).free_symbols:
        common = sympy.denom(ratio)
        left, right = ratio * common, common
    relation = condition.rel_op
    if relation == ">" and right.is_Integer:
        relation, right = ">=", right + 1
    return f"{left} {relation} {right}"


def _wrong(
    program: Program, named: Mapping[sympy.Symbol, str], sizes: Mapping[str, int]
) -> Iterator[sympy.Basic]:
    """The bounds and the guards that do not hold."""
    values = {symbol: sizes[name] for symbol, name in named.items()}
    ranges = program.exported.range_constraints
    bounds = (
        bound
        for symbol in values
        if symbol in ranges
        for bound in (symbol >= ranges[symbol].lower, symbol <= ranges[symbol].upper)
    )
    guards = (guard.expr for guard in shape_env(program.exported).guards)
    return (e for e in chain(bounds, guards) if e.xreplace(values) == sympy.false)


def _named(program: Program, sizes: Mapping[str, int]) -> dict[sympy.Symbol, str]:
    """The dimension that each symbol is."""
    nodes = {node.name: node for node in program.exported.graph.find_nodes(op="placeholder")}
    placeholders = program.exported.graph_signature.user_inputs
    return {
        size.node.expr: str(dim)
        for spec, node in zip(program.inputs, placeholders, strict=True)
        for dim, size in zip(spec.dims, nodes[str(node)].meta["val"].shape, strict=True)
        if dim in sizes
    }
