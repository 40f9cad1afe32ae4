"""What model code decides by how many values are selected: `if rows.numel() == 0: continue`.

A capture does not know how many a mask or an index selects. It goes the way of some, and not all,
which is as a rule right for none and for all, too. That is tried: at inputs where the model goes
another way, the program gives the same. Where no inputs are found at which it would, artifacts fail
there.
"""

import operator
import sys
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType, MappingProxyType
from typing import Any
from unittest import mock

import sympy  # type: ignore[import-untyped]  # it has no types
import torch
from torch import SymBool, SymInt, Tensor, fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, free_unbacked_symbols

from fuseport.exporter.capture import _enumerated
from fuseport.exporter.capture._tests_of_loops import asks_there
from fuseport.exporter.capture.blockers import is_users
from fuseport.exporter.capture.decisions import Decision, place_of
from fuseport.exporter.capture.integers import unseen
from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.program import Program, joining, rebuilt
from fuseport.exporter.program.conditions import admits, sizes_at
from fuseport.exporter.program.matching import ASSERT, Inseparable, marked, marker, mode_of
from fuseport.exporter.program.refusing import asserted
from fuseport.exporter.program.rounding import same

aten = torch.ops.aten

__all__ = ["Call", "Counted", "Marked", "Otherwise", "answered", "joined", "settled"]


class Otherwise(ExportFailed):
    """By another way of such decisions the model computes something else, or raises no error.

    Attributes:
        places: of the decisions, `file:line`.
        raised: what the model raises there; None where it computes something else.
    """

    def __init__(self, places: Iterable[str], instead: str, raised: str | None = None) -> None:
        self.places = frozenset(places)
        self.raised = raised
        super().__init__(
            "the program cannot be captured: how many values are selected, or a size that hangs on "
            f"values, is decided by at {', '.join(sorted(self.places))}, and {instead}; compute "
            "with tensors whose sizes do not hang on values there (a mask, torch.where)"
        )


@dataclass(frozen=True)
class Counted:
    """A decision by how many values are selected.

    Attributes:
        decision: as it comes out in the program.
        of_sizes: whether all that it is about are sizes, and not values of tensors.
    """

    decision: Decision
    of_sizes: bool

    @property
    def name(self) -> str:
        """What its mark is called; decisions by values have others."""
        return f"count {self.decision.name}"


Call = Callable[[], tuple[Sequence[Tensor], Sequence[Tensor]]]
"""Inputs, and what the model gives of them."""

Marked = tuple[Program, Sequence[Counted]]
"""A program with its marks, and the decisions that they stand for."""

Captured = Callable[[Mapping[str, bool]], Marked]

# Decisions by which something else is computed: of graphs in graphs, torch loses such sizes.
_MOST_BOTH = 1
_MOST_TURNS = 1000  # of a loop that decides in each
_FEW_TURNS = 16  # of one that is left by a value, which is no size
_MOST_IN_ALL = 10  # times as many, in what it calls
_SOME = 1_000_003  # values that are selected
_ALL = 1_000_000_007  # of so many

# Of numbers, and of tensors.
_RELATIONS = {
    operator.eq: aten.eq.Tensor,
    operator.ne: aten.ne.Tensor,
    operator.lt: aten.lt.Tensor,
    operator.le: aten.le.Tensor,
    operator.gt: aten.gt.Tensor,
    operator.ge: aten.ge.Tensor,
}


@contextmanager
def answered(
    found: list[Counted], turned: Container[str] = (), fixed: Mapping[str, bool] | None = None
) -> Iterator[None]:
    """In a capture: model code goes the way of some values, and not all, which is marked.

    Args:
        found: becomes these decisions.
        turned: the places where it goes the other way.
        fixed: what some come to, by name, whatever the place.
    """
    own: Callable[[SymBool], bool] = SymBool.__bool__

    def of_sizes(condition: SymBool) -> bool:
        node: Any = condition.node
        return bool(node.shape_env.size_like >= free_unbacked_symbols(node.expr))

    def mark(condition: SymBool, place: str, value: bool) -> bool:
        before = sum(each.decision.place == place for each in found)
        counted = Counted(Decision(place, before, value), of_sizes(condition))
        value = (fixed or {}).get(counted.name, value)
        found.append(replace(counted, decision=replace(counted.decision, value=value)))
        held: Any = condition
        ASSERT(torch.scalar_tensor(held, dtype=torch.bool), marker(counted.name))
        return value

    def assume(condition: SymBool, frame: FrameType) -> bool:
        place = place_of(frame)
        if place in turned:
            return False
        return mark(condition, place, True)

    turns: Counter[FrameType] = Counter()  # by frames that go on

    def refuse_endless(condition: SymBool, frame: FrameType, place: str) -> None:
        for ended in turns.keys() - set(_and_its_callers(frame)):
            del turns[ended]
        turns[frame] += 1
        by_value = asks_there(frame) and not of_sizes(condition)
        most = _FEW_TURNS if by_value else _MOST_TURNS
        if turns[frame] > most or len(found) > _MOST_IN_ALL * _MOST_TURNS:
            raise ExportFailed(
                f"the program cannot be captured: {place} decides by a size or a number that hangs "
                "on values, again and again: a loop has no end there that a capture comes to"
            )

    def decided(condition: SymBool, frame: FrameType | None) -> bool:
        try:
            return own(condition)
        except GuardOnDataDependentSymNode:
            if frame is None or not is_users(frame):
                raise
        place = place_of(frame)
        refuse_endless(condition, frame, place)
        return mark(condition, place, _of_some(condition.node.expr) is not (place in turned))

    def of_condition(condition: SymBool) -> bool:
        return decided(condition, sys._getframe(1))

    def of_number(number: SymInt) -> bool:
        some: Any = number != 0
        return decided(some, sys._getframe(1)) if isinstance(some, SymBool) else bool(some)

    with (
        mock.patch.object(SymBool, "__bool__", of_condition),
        mock.patch.object(SymInt, "__bool__", of_number),
        unseen(__file__, _enumerated.__file__),
        _enumerated.Enumerated(assume),
    ):
        yield


def _and_its_callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _of_some(condition: sympy.Basic) -> bool:
    """What a condition comes to where some values are selected, and not all."""
    values = {
        size: (_SOME if str(size).startswith("u") else _ALL) + 2 * number
        for number, size in enumerate(sorted(condition.free_symbols, key=str))
    }
    try:
        return bool(condition.xreplace(values))
    except ZeroDivisionError:  # by a quotient of what is no size; either way is tried
        return True


def joined(captured: Captured, places: Container[str], fixed: Mapping[str, bool]) -> Marked:
    """A program that goes either way by the decisions of some places.

    Args:
        captured: a program, with the marks of all decisions, of which some are as told, by name.
        places: of the decisions.
        fixed: what some come to.

    Raises:
        Inseparable: there are too many ways, or they cannot be in one program.
        ExportFailed: as of `captured`.
    """
    program, counted = captured(fixed)
    free = (c for c in counted if c.decision.place in places and c.name not in fixed)
    first = next(free, None)
    if first is None:
        return program, counted
    if len(fixed) == _MOST_BOTH:
        raise Inseparable(f"there are more than {_MOST_BOTH} such decisions")
    (yes, some), (no, others) = (
        joined(captured, places, {**fixed, first.name: value}) for value in (True, False)
    )
    every = {each.name: each for each in (*some, *others)}
    alone = {
        name: None if each.decision.place in places else each.decision.value
        for name, each in every.items()
    }
    program = joining.joined(first.name, yes, no, alone)
    left = marked(program.exported.graph)
    return program, [each for name, each in every.items() if name in left]


def settled(
    program: Program,
    counted: Sequence[Counted],
    calls: Iterable[Call],
    both: Container[str] = (),
    fatal: Mapping[str, str] = MappingProxyType({}),
) -> Program:
    """A program without the marks of such decisions, held against its model.

    Args:
        program: with the marks.
        counted: all of them.
        calls: at inputs at which some decision of every place, as of a loop, should come out
            otherwise than in the program.
        both: the places of those of which the program has both ways.
        fatal: what the model raises where they come out otherwise, by place.

    Raises:
        Otherwise: the program gives something else than the model.
        ExportFailed: what it decides by is no size, and no inputs are found at which it would come
            out otherwise.
    """
    tried = _tried(program, counted, calls)
    exported = program.exported
    marks = marked(exported.graph)
    told: dict[str, str] = {}
    for each in counted:
        decision, mark = each.decision, marks[each.name]
        place, value = decision.place, decision.value
        said = f"the way of {value} is in the programs, which is right for both"
        if place in both:
            said = "both ways are in the programs"
        elif place not in tried:
            if not each.of_sizes and place not in fatal:
                raise ExportFailed(f"{place} decides by a value, which came out alike when tried")
            for made, wanted in _relations(mark, value):
                mark.update_arg(0, _of_tensors(made, mark))
                asserted(mark, wanted, f"{place} comes to {value}")
            said = f"the way of {value} is in the programs, artifacts fail where it comes out "
            said += f"otherwise{_raising(fatal.get(place))}"
        told[place] = f"{place} decides by how many values are selected: {said}"
        exported.graph.erase_node(mark)
    exported.graph.eliminate_dead_code()
    exported = rebuilt(exported, exported.graph, exported.graph_signature.input_specs)
    return replace(
        program,
        exported=exported,
        decided=(*program.decided, *told.values()),
        both_ways=(*program.both_ways, *(place for place in told if place in tried)),
    )


def _raising(error: str | None) -> str:
    return "" if error is None else f", as the model does: {error}"


def _tried(program: Program, counted: Sequence[Counted], calls: Iterable[Call]) -> set[str]:
    """The places where a decision came out otherwise, and the program gave what the model does.

    Raises:
        Otherwise: somewhere it did not.
    """
    module = program.exported.module(check_guards=False)
    assert isinstance(module, fx.GraphModule)
    places = {each.decision.place for each in counted}
    tried: set[str] = set()
    failed: list[set[str]] = []
    for call in calls:
        try:
            inputs, expected = call()
        except Exception:  # the model's own, which may take no such sizes
            continue
        watched = _Watched(module)
        try:
            with torch.no_grad():
                result = watched.run(*inputs)
        except Exception:  # of an operator, which may take no tensor without values
            right = False
        else:
            right = same(result, expected)
        came = watched.came
        there = {c.decision.place for c in counted if came.get(c.name) is not c.decision.value}
        if right:
            tried |= there
        elif admits(program, sizes_at(program, inputs)):
            failed.append(there)
    if failed:
        # Of all that came out otherwise, not what did so where nothing was wrong, if that is left.
        suspect = min((there - tried or there or places for there in failed), key=len)
        raise Otherwise(suspect, "where it comes out otherwise the model computes something else")
    return tried


def _relations(mark: fx.Node, value: bool) -> list[tuple[fx.Node, bool]]:
    """What has to be compared for a mark's decision to come to a value, and to what.

    Where torch has taken a number of values and a size for one, since the program holds only where
    they are, the comparison is of nothing any more: then those that torch itself asserts.

    Raises:
        ExportFailed: it does not compare two numbers.
    """
    made = mark.args[0]
    assert isinstance(made, fx.Node)
    compared = made.args[0]
    if not isinstance(compared, fx.Node) or compared.target not in _RELATIONS:
        raise ExportFailed(f"a decision by {compared} cannot be in artifacts")
    first, second = map(_size, compared.args)
    if first != second:
        return [(compared, value)]
    noted = [
        node.args[0] for node in mark.graph.nodes if node.target is aten._assert_scalar.default
    ]
    known = {
        each.args: (each, True)
        for each in noted
        if isinstance(each, fx.Node)
        and each.target is operator.eq
        and each.args[0] is not each.args[1]
        and first in map(_size, each.args)
    }
    if not known:
        raise ExportFailed("a decision by sizes that torch took for one cannot be in artifacts")
    return [*known.values()]


def _size(side: Any) -> Any:
    """A number, or the expression of one that is known when an artifact runs."""
    value = side.meta["val"] if isinstance(side, fx.Node) else side
    return value.node.expr if isinstance(value, SymInt | torch.SymFloat) else value


def _of_tensors(compared: fx.Node, mark: fx.Node) -> fx.Node:
    """The same comparison, of tensors, as artifacts of all formats can, before a mark."""
    graph, known = mark.graph, mark.args[0]
    assert isinstance(known, fx.Node)
    values: list[Any] = [
        side.meta["val"] if isinstance(side, fx.Node) else side for side in compared.args
    ]
    whole = all(isinstance(value, int | SymInt) for value in values)
    dtype = torch.int64 if whole else torch.float64
    relation: Any = compared.target
    with graph.inserting_before(mark):
        sides = []
        for side, value in zip(compared.args, values, strict=True):
            node = graph.call_function(aten.scalar_tensor.default, (side,), {"dtype": dtype})
            with mode_of(graph):
                node.meta["val"] = torch.scalar_tensor(value, dtype=dtype)
            sides.append(node)
        held = graph.call_function(_RELATIONS[relation], tuple(sides))
        held.meta["val"] = known.meta["val"]
    return held


class _Watched(fx.Interpreter):
    """Runs a graph, and what its marks came to, by name, is in `came`."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self._marks = {node: name for name, node in marked(module.graph).items()}
        self.came: dict[str, bool] = {}

    def run_node(self, n: fx.Node) -> Any:
        """As of `Interpreter`; at a mark, no assertion."""
        if n not in self._marks:
            return super().run_node(n)
        (held, _), _ = self.fetch_args_kwargs_from_env(n)
        self.came[self._marks[n]] = bool(held)
        return None
