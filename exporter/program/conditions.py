"""What torch took for granted of a program's sizes in its capture.

A convolution needs a window's length; a network that halves and doubles a length may need an even
one; and torch takes a size of 2 or more for granted in places where it need not.
"""

import functools
import math
import os
import random
import traceback
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise, product
from pathlib import Path
from typing import Any

import sympy  # type: ignore[import-untyped]  # it has no types
import torch
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from fuseport.exporter.program import Program, near, shape_env
from fuseport.exporter.program.regions import scans
from fuseport.exporter.program.sizes._arithmetic import fails, holds

__all__ = [
    "admits",
    "beyond",
    "depends_on",
    "dimensions",
    "excluded",
    "forget",
    "hold_at",
    "in_words",
    "nearly_fixed",
    "needed",
    "places",
    "sizes_at",
    "summarised",
    "violated",
]


def admits(program: Program, sizes: Mapping[str, int]) -> bool:
    """Whether the program holds for these sizes of its dynamic dimensions, as far as known."""
    return next(_wrong(program, _named(program, sizes), sizes), None) is None


def sizes_at(program: Program, inputs: Sequence[torch.Tensor]) -> dict[str, int]:
    """The sizes of its dynamic dimensions in a call."""
    shapes = zip(program.inputs, inputs, strict=True)
    pairs = [pair for spec, x in shapes for pair in zip(spec.dims, x.shape, strict=True)]
    return {dim: size for dim, size in pairs if isinstance(dim, str)}


def violated(program: Program, sizes: Mapping[str, int]) -> tuple[sympy.Basic, ...]:
    """What was taken for granted, and is not so at these sizes, in terms of the dimensions."""
    named = _named(program, sizes)
    called = {
        symbol: sympy.Symbol(name, integer=True, positive=True) for symbol, name in named.items()
    }
    wrong = _wrong(program, named, sizes)
    return tuple(dict.fromkeys(expr.xreplace(called) for expr in wrong))


def nearly_fixed(program: Program, usual: Mapping[str, int]) -> bool:
    """Whether a dimension is known to be right at hardly any other size, as by a loop over half of
    it: not at 1, odd or large."""
    return any(not any(admits(program, sizes) for sizes in _others(usual, name)) for name in usual)


def excluded(program: Program, usual: Mapping[str, int]) -> int:
    """How many of some sizes the program does not hold for: with one dimension 1, odd or large."""
    tried = (sizes for name in usual for sizes in _others(usual, name))
    return sum(not admits(program, sizes) for sizes in tried)


def _others(usual: Mapping[str, int], name: str) -> Iterator[dict[str, int]]:
    yield from ({**usual, name: other} for other in (1, 3, 65, usual[name] * 4096))


def places(program: Program, sizes: Mapping[str, int]) -> list[str]:
    """Where model code asks for what is not so at these sizes, as `file:line`."""
    values = {symbol: sizes[name] for symbol, name in _named(program, sizes).items()}
    asked = (
        guard.sloc.framework_loc
        for guard in shape_env(program.exported).guards
        if fails(guard.expr, values)
    )
    own = (
        frame
        for frame in asked
        if isinstance(frame, traceback.FrameSummary) and not frame.filename.startswith(_OTHERS)
    )
    return list(dict.fromkeys(f"{near(frame.filename)}:{frame.lineno}" for frame in own))


# Torch's and our own.
_OTHERS = os.path.dirname(torch.__file__) + os.sep, str(Path(__file__).parents[1]) + os.sep


def dimensions(program: Program) -> dict[sympy.Symbol, str]:
    """The dynamic dimension that each symbolic size is."""
    return _named(program, {dim for spec in program.inputs for dim in spec.dims})


def depends_on(condition: sympy.Basic, named: Mapping[sympy.Symbol, str]) -> list[str]:
    """What a condition is about, but for factors of both sides, of `dimensions`."""
    about = _reduced(condition).free_symbols
    return [name for symbol, name in named.items() if symbol in about]


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
        new = dict(known)
        for symbol in values.keys() & known.keys():
            # What bounds it from above is a guard, too, if anything does any more.
            above = values[symbol] > known[symbol].upper
            new[symbol] |= ValueRanges(values[symbol], int_oo if above else values[symbol])
        return new

    kept = [guard for guard in env.guards if not fails(guard.expr, values)]
    become(kept, widened(ranges), widened(env.var_to_range))
    return lambda: become(*before)


def beyond(
    program: Program, usual: Mapping[str, int], far: Mapping[str, int]
) -> dict[str, int] | None:
    """The smallest sizes from `usual` to `far` where nothing fails to hold but what does not there.

    None if all holds there, or something else fails near them.
    """
    wrong = violated(program, far)
    if not wrong:
        return None

    def between(part: int) -> dict[str, int]:
        return {name: min(size + part, far[name]) for name, size in usual.items()}

    def hold(part: int) -> bool:
        return hold_at(wrong, between(part))

    most = max(far[name] - size for name, size in usual.items())
    # As what holds for all but multiples of a number does, which begins to hold again.
    near = next((part for part in range(1, min(_TRIED, most) + 1) if not hold(part)), None)
    last = _last(hold, 0, most) if near is None else near - 1
    after = (between(last + more) for more in range(1, _NEAR + 1))
    return next((sizes for sizes in after if set(violated(program, sizes)) <= set(wrong)), None)


def hold_at(conditions: Iterable[sympy.Basic], sizes: Mapping[str, int]) -> bool:
    """Whether conditions in terms of the dimensions hold at these sizes, as far as is known."""
    values = {sympy.Symbol(n, integer=True, positive=True): size for n, size in sizes.items()}
    return not any(fails(condition, values) for condition in conditions)


def needed(conditions: Iterable[sympy.Basic]) -> tuple[sympy.Basic, ...]:
    """Those of which the others follow, at the sizes that are tried, without common factors."""
    distinct = [c for c in dict.fromkeys(map(_reduced, conditions)) if c != sympy.true]
    alone = _alone(distinct)
    limits = {dim: _limit(found) for dim, found in alone.items()}
    admitted = {dim: _admitted(found) for dim, found in alone.items()}
    kept: list[sympy.Basic] = []
    for dim, found in alone.items():
        limit = limits[dim]
        if limit is not None:
            ends = [c for c in found if _holds(c) == _EVERYWHERE and not _at(c, limit + 1)]
            found = [c for c in found if _holds(c) != _EVERYWHERE]
            kept.append(min(ends, key=_length))
        kept += _needed(found)
    kept += (
        condition
        for condition in distinct
        if len(condition.free_symbols) > 1 and not _follows(condition, admitted, limits)
    )
    return tuple(kept)


def summarised(conditions: Iterable[sympy.Basic]) -> list[str]:
    """Conditions in words, those of one dimension together: `57 <= height <= 64`.

    Those that follow from others are left out.
    """
    kept = needed(conditions)
    words: list[str] = []
    for dim, found in _alone(kept).items():
        limit = _limit(found)
        within = [c for c in found if limit is None or _holds(c) != _EVERYWHERE]
        if within:
            said = _sizes(str(dim), _admitted(within))
            words += map(in_words, within) if said is None else [said]
        if limit is not None:
            words.append(f"{dim} <= {limit}")
    words += (in_words(condition) for condition in kept if len(condition.free_symbols) > 1)
    return list(dict.fromkeys(words))


_TRIED = 1024  # sizes of a dimension
_EVERYWHERE = frozenset(range(1, _TRIED + 1))
_FURTHEST = 2**40  # to which a limit is looked for
_TRIED_TOGETHER = 256
_NEAR = 64  # how far beyond a limit something else may fail


def _alone(conditions: Iterable[sympy.Basic]) -> dict[sympy.Symbol, list[sympy.Basic]]:
    """The conditions that are about one dimension, by it."""
    found: dict[sympy.Symbol, list[sympy.Basic]] = {}
    for condition in conditions:
        if len(condition.free_symbols) == 1:
            (dim,) = condition.free_symbols
            found.setdefault(dim, []).append(condition)
    return found


def _at(condition: sympy.Basic, size: int) -> bool:
    """Whether a condition on one dimension holds at a size."""
    (dim,) = condition.free_symbols
    return holds(condition, {dim: size})


def _length(condition: sympy.Basic) -> int:
    return len(in_words(condition))


def _limit(conditions: Sequence[sympy.Basic]) -> int | None:
    """The largest size at which those hold that hold at all sizes tried; None if there is none."""
    further = [c for c in conditions if _holds(c) == _EVERYWHERE]

    def hold(size: int) -> bool:
        return all(_at(c, size) for c in further)

    good = _TRIED
    while hold(good * 2):
        good *= 2
        if good >= _FURTHEST:
            return None
    return _last(hold, good, good * 2)


def _last(hold: Callable[[int], bool], good: int, bad: int) -> int:
    """The last number from `good` to `bad` for which something holds that ends to hold once."""
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if hold(middle) else (good, middle)
    return good


@functools.lru_cache(1024)
def _holds(condition: sympy.Basic) -> frozenset[int]:
    """The sizes, of those tried, at which a condition holds."""
    return frozenset(size for size in range(1, _TRIED + 1) if _at(condition, size))


def _admitted(conditions: Iterable[sympy.Basic]) -> list[int]:
    """The sizes, of those tried, at which all conditions hold."""
    return sorted(_EVERYWHERE.intersection(*(_holds(c) for c in conditions)))


def _needed(conditions: Sequence[sympy.Basic]) -> list[sympy.Basic]:
    """Those that do not follow from the others, at the sizes tried; of like ones the shortest."""
    kept = list(conditions)
    for condition in sorted(kept, key=_length, reverse=True):
        others = (c for c in kept if c != condition)
        if _holds(condition).issuperset(_admitted(others)):
            kept.remove(condition)
    return kept


def _sizes(name: str, admitted: Sequence[int]) -> str | None:
    """Sizes that are one, a range, multiples of one number, or ranges a period apart, in words."""
    if not admitted:
        return None
    first, last = admitted[0], admitted[-1]
    if first == last:
        return f"{name} == {first}"
    step = admitted[1] - first
    if any(after - before != step for before, after in pairwise(admitted)):
        return _runs(name, admitted)
    if step == 1:
        return f"{name} >= {first}" if last == _TRIED else f"{first} <= {name} <= {last}"
    if first % step:
        return None
    bounds = [f">= {first}"] * (first != step) + [f"<= {last}"] * (last + step <= _TRIED)
    return " and ".join([f"{name} is a multiple of {step}", *bounds])


def _runs(name: str, admitted: Sequence[int]) -> str | None:
    """Ranges of one length, a period apart, in words; the first and the last may be cut off."""
    firsts = [size for size in admitted if size - 1 not in admitted]
    lasts = [size for size in admitted if size + 1 not in admitted]
    whole = slice(firsts[0] == 1, -1)
    lengths = {last - first for first, last in zip(firsts[whole], lasts[whole], strict=True)}
    periods = {after - before for before, after in pairwise(firsts[whole.start :])}
    if len(periods) != 1 or len(lengths) != 1 or firsts[-1] + min(periods) <= _TRIED:
        return None
    ranges = [f"{first} to {last}" for first, last in zip(firsts[:2], lasts[:2], strict=True)]
    return f"{name} is {', '.join(ranges)} and so on"


def _follows(
    condition: sympy.Basic,
    admitted: Mapping[sympy.Symbol, Sequence[int]],
    limits: Mapping[sympy.Symbol, int | None],
) -> bool:
    """Whether a condition holds at all sizes that are tried.

    Those are the smallest and the largest, and some drawn among many, or all of few.
    """
    dims = list(condition.free_symbols)
    sizes_of = [admitted.get(dim) or range(1, _TRIED + 1) for dim in dims]
    ends = product(*map(_ends, sizes_of, map(limits.get, dims)))
    others: Iterable[tuple[int, ...]] = product(*sizes_of)
    if math.prod(map(len, sizes_of)) > _TRIED_TOGETHER:
        draw = random.Random(0)
        others = (tuple(map(draw.choice, sizes_of)) for _ in range(_TRIED_TOGETHER))
    return all(
        holds(condition, dict(zip(dims, sizes, strict=True))) for sizes in chain(ends, others)
    )


def _ends(sizes: Sequence[int], limit: int | None) -> list[int]:
    """The smallest and the largest, and one far beyond, at the limit where one bounds them."""
    step = sizes[1] - sizes[0] if len(sizes) > 1 else 0
    furthest = _TRIED * 2**20 if limit is None else limit
    far = [furthest // step * step] if step and sizes[-1] + step > _TRIED else []
    return [*sizes[:2], sizes[-1], *far]


def _reduced(condition: sympy.Basic) -> sympy.Basic:
    """Without factors of both sides, as a batch is as a rule, unless nothing is left then.

    Of `Mod(8 * x, 4 * x) == 0` that is nothing, though it is not so where x is 0.
    """
    relation = sympy.core.relational.Relational
    reduced = condition
    for dim in condition.free_symbols if isinstance(condition, relation) else ():
        left, right = sympy.cancel(reduced.lhs / dim), sympy.cancel(reduced.rhs / dim)
        if dim not in left.free_symbols | right.free_symbols:
            reduced = reduced.func(left, right)
        if not isinstance(reduced, relation):
            return condition
    return reduced


def in_words(condition: sympy.Basic) -> str:
    """A condition on sizes, which are positive, as short as can be."""
    if not isinstance(condition, sympy.core.relational.Relational):
        return str(condition)
    left, right = condition.lhs, condition.rhs
    # 16*batch*length != 16*length is batch != 1.
    if right.is_positive:
        over, common = sympy.fraction(sympy.together(sympy.cancel(left / right)))
        if not common.free_symbols:
            left, right = over, common
    relation = condition.rel_op
    if relation == ">" and right.is_Integer:
        relation, right = ">=", right + 1
    return f"{left} {relation} {right}"


def _wrong(
    program: Program, named: Mapping[sympy.Symbol, str], sizes: Mapping[str, int]
) -> Iterator[sympy.Basic]:
    """The bounds and the guards that do not hold, and that loops have turns."""
    values = {symbol: sizes[name] for symbol, name in named.items()}
    ranges = program.exported.range_constraints
    outside = (
        (symbol, ranges[symbol])
        for symbol, size in values.items()
        if symbol in ranges and not ranges[symbol].lower <= size <= ranges[symbol].upper
    )
    bounds = (
        bound
        for symbol, within in outside
        for bound in (symbol >= within.lower, symbol <= within.upper)
    )
    guards = (guard.expr for guard in shape_env(program.exported).guards)
    found = chain(bounds, guards, _turning(program))
    return (condition for condition in found if fails(condition, values))


def _turning(program: Program) -> Iterator[sympy.Basic]:
    """That each loop has a turn: torch has loops of none from 2.14 on, artifacts have not."""
    for _, scan in scans(program.exported.graph_module):
        slices: Any = scan.args[2]
        if slices and isinstance(turns := slices[0].meta["val"].shape[0], torch.SymInt):
            yield turns.node.expr >= 1


def _named(program: Program, sizes: Container[int | str]) -> dict[sympy.Symbol, str]:
    """The dimension that each symbol is, of those in `sizes`."""
    nodes = {node.name: node for node in program.exported.graph.find_nodes(op="placeholder")}
    placeholders = program.exported.graph_signature.user_inputs
    return {
        size.node.expr: str(dim)
        for spec, node in zip(program.inputs, placeholders, strict=True)
        for dim, size in zip(spec.dims, nodes[str(node)].meta["val"].shape, strict=True)
        if isinstance(dim, str) and dim in sizes
    }
