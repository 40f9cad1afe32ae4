"""What model code decides by values of tensors: `if x.max() > 3:`, `assert not x.isnan().any()`.

A capture follows one way. Which of them the model goes at the example's values is noted from a run;
what it would do otherwise is asked of runs and captures with other answers. Where the model then
raises, artifacts fail, too; where nothing is computed otherwise, as where something is logged, the
decision is left out; else both ways are in the program.
"""

import ast
import copy
import itertools
import linecache
import os
import re
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.export.graph_signature import InputKind

from fuseport.exporter.capture._asked import answered
from fuseport.exporter.capture.blockers import is_users, users_frame
from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.program import Program, one_line, rebuilt
from fuseport.exporter.program.joining import alike, joined
from fuseport.exporter.program.loops.reached import Condition
from fuseport.exporter.program.matching import ASSERT, Inseparable, marked, marker, unmark
from fuseport.exporter.program.refusing import asserted
from fuseport.exporter.program.regions import regions
from fuseport.exporter.program.rounding import close

__all__ = [
    "MOST",
    "Decision",
    "Ending",
    "Run",
    "decided",
    "following",
    "means_to_raise",
    "noted",
    "place_of",
]

aten = torch.ops.aten

MOST = 128
"""Decisions of a model."""

_MOST_BOTH = 4  # of them, those by which something else is computed
_MOST_WAYS = 12  # that are captured, for all of them to be in a program


@dataclass(frozen=True)
class Decision:
    """One that model code makes.

    Attributes:
        place: `file:line`, the file without its folder.
        time: how many were made there before.
        value: what it comes to.
    """

    place: str
    time: int
    value: bool

    @property
    def name(self) -> str:
        """What it is called, whatever it comes to."""
        return f"{self.place}, {self.time}"


Ending = Callable[[Tensor, FrameType], Condition | None]
"""What a condition comes to that code asks for in a frame, if it is about the end of a loop."""

Run = Callable[[Mapping[str, bool]], tuple[Sequence[Decision], Sequence[Tensor]]]
Captured = Callable[[Sequence[Decision]], Program]
Called = Callable[[Program], Sequence[Tensor]]


def decided(
    run: Run,
    captured: Captured,
    called: Called,
    guarding: Mapping[str, bool] | None = None,
    alone: Mapping[str, str] | None = None,
) -> Program:
    """A program that decides as the model does.

    Args:
        run: calls the model, with other answers for some of its decisions, by name; the decisions
            that it made, and its outputs.
        captured: the program of such decisions, which are marked in it.
        called: the outputs of a program, of the same inputs.
        guarding: what decisions may always come to; see `guards`.
        alone: why there is no program of the other way of some; see `one_way`.

    Raises:
        Inseparable: the model decides nothing by values, or too much, or what it decides is about
            more than what is computed.
        ExportFailed: as of `captured`.
    """
    try:
        usual, _ = run(guarding or {})
    except Exception as error:  # the model's own, where a number is a tensor
        raise Inseparable(one_line(error)) from error
    run = _refusing(run)
    if not 0 < len(usual) <= MOST:
        raise Inseparable(f"there are {len(usual)} such decisions")
    ways = _Ways(run, captured, usual, guarding or {}, alone or {})
    asked = ways.that_matter()
    if len(asked) > _MOST_BOTH:
        raise Inseparable(
            f"{len(asked)} such decisions, more than {_MOST_BOTH}, change what is computed"
        )
    program = ways.joined({}, asked)
    if ways.fatal.keys() & ways.both:
        raise Inseparable("such a decision leads to an error by some ways")
    for name in ways.both & marked(program.exported.graph).keys():
        _compare(program, ways.seen[name], run, called)
    return ways.settled(program)


class _RefusedError(Exception):
    """The model's code raises an error by some way, and means to: what it says."""


def _refusing(run: Run) -> Run:
    """A run that tells what model code raises from what it runs into.

    Raises:
        Inseparable: on some way, the code cannot go on with the values that there are.
    """

    def refusing(answers: Mapping[str, bool]) -> tuple[Sequence[Decision], Sequence[Tensor]]:
        try:
            return run(answers)
        except Exception as error:  # the model's own
            if means_to_raise(error):
                raise _RefusedError(one_line(error)) from error
            raise Inseparable(f"by one of its ways there is: {one_line(error)}") from error

    return refusing


def means_to_raise(error: BaseException) -> bool:
    """Whether model code is there to raise an error: `raise`, `assert`, `torch._check`."""
    places = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if is_users(frame) or _checks_values(frame)
    ]
    return bool(places) and _is_to_raise(*places[-1])


def _checks_values(frame: FrameType) -> bool:
    """Whether it is of torch's functions in Python, which may check the values that they get."""
    module = str(frame.f_globals.get("__name__"))
    return module.startswith(("torch.nn.functional", "torch.nn.modules.", "torch.distributions."))


def _is_to_raise(file: str, line: int) -> bool:
    """Whether that is what a line of code is there for."""
    lines = linecache.getlines(file)
    if re.search(r"\b_(assert|check)", "".join(lines[line - 1 : line])):
        return True
    nodes = ast.walk(ast.parse("".join(lines)))
    raising = (node for node in nodes if isinstance(node, ast.Raise | ast.Assert))
    return any(node.lineno <= line <= (node.end_lineno or line) for node in raising)


class _Ways:
    """The ways that a model can go.

    Args:
        run: see `decided`.
        captured: see `decided`.
        usual: its decisions at the example's values.
        guarding: see `decided`.
        alone: see `decided`.

    Attributes:
        seen: the decisions on all ways that were gone, by name, as they came out first.
        fatal: the errors that the model raises where some come out otherwise.
        both: the names of those of which both ways are in the program.
    """

    def __init__(
        self,
        run: Run,
        captured: Captured,
        usual: Sequence[Decision],
        guarding: Mapping[str, bool],
        alone: Mapping[str, str],
    ) -> None:
        self._run, self._captured, self._guarding, self._alone = run, captured, guarding, alone
        self._usual = {decision.name: decision.value for decision in usual}
        self._first = captured(usual)
        self._ready = {tuple(usual): self._first}  # captured, and in no way yet
        self._left = _MOST_WAYS
        self.seen = {decision.name: decision for decision in usual}
        self.fatal: dict[str, str] = {}
        self.both: set[str] = set()
        self._constant = _always(self._first)
        for name, value in self._usual.items():
            if name in guarding or name in alone or name in self._constant:
                continue
            try:
                run({**guarding, name: not value})
            except _RefusedError as error:
                self.fatal[name] = str(error)

    def that_matter(self) -> list[str]:
        """The decisions by which something else is computed."""
        known = {*self.fatal, *self._guarding, *self._alone, *self._constant}
        free = [name for name in self._usual if name not in known]
        if not free or not self._matter(free):
            return []
        places = dict.fromkeys(self.seen[name].place for name in free)
        of_places = [[name for name in free if self.seen[name].place == p] for p in places]
        if len(of_places) == 1:
            return free
        return list(itertools.chain(*filter(self._matter, of_places)))

    def _matter(self, names: Sequence[str]) -> bool:
        turned = {name: not self._usual[name] for name in names}
        try:
            made, _ = self._run({**self._usual, **turned})
            other = self._ready[tuple(made)] = self._captured(made)
        except (_RefusedError, ExportFailed):
            return True
        return not alike(self._first, other)

    def joined(self, turned: Mapping[str, bool], asked: Collection[str]) -> Program:
        """One program for all ways that begin as told.

        Args:
            turned: what some decisions come to.
            asked: which others may come to something else; others of the usual ones do not.

        Raises:
            Inseparable: there are too many ways, or they cannot be in one program.
            _RefusedError: the model goes none of them.
        """
        fixed = {name: value for name, value in self._usual.items() if name not in asked}
        told = {**fixed, **turned}
        made, _ = self._run(told)
        for each in made:
            self.seen.setdefault(each.name, each)
        decision = next((each for each in made if each.name not in told), None)
        if decision is None:
            return self._way(made, asked)
        found: dict[bool, Program] = {}
        failure: _RefusedError | None = None
        for value in (decision.value, not decision.value):
            try:
                found[value] = self.joined({**turned, decision.name: value}, asked)
            except _RefusedError as error:
                failure = error
        if failure is not None:
            if not found:
                raise failure
            ((value, program),) = found.items()
            self.fatal[decision.name] = str(failure)
            self.seen[decision.name] = replace(decision, value=value)
            return program
        if alike(found[True], found[False]):
            unmark(found[decision.value].exported.graph, {decision.name})
            return found[decision.value]
        self.both.add(decision.name)
        others = {
            **{name: self.seen[name].value for name in self.fatal},
            **dict.fromkeys(self.both),
        }
        return joined(decision.name, found[True], found[False], others)

    def _way(self, made: Sequence[Decision], asked: Collection[str]) -> Program:
        """The program of one way, marked where something hangs on it."""
        self._left -= 1
        if self._left < 0:
            raise Inseparable(f"there are more than {_MOST_WAYS} ways by such decisions")
        try:
            program = self._ready.pop(tuple(made), None) or self._captured(made)
        except ExportFailed as error:
            raise Inseparable(f"otherwise {error}") from error
        self._constant |= _always(program)
        held = {*asked, *self.fatal, *self._alone}
        idle = {name for name in self._usual if name not in held}
        unmark(program.exported.graph, idle | self._constant)
        return program

    def settled(self, program: Program) -> Program:
        """The program without marks, with assertions where the model raises, and what to tell."""
        exported = program.exported
        graph = exported.graph
        marks = marked(graph)
        told: dict[str, list[str]] = {}
        for name, decision in self.seen.items():
            if name in self._constant:
                continue
            if name in self._guarding:
                said = f"the way of {decision.value} is in the programs, which is right for both"
            elif name in self.both:
                said = "both ways are in the programs"
            elif name in self.fatal:
                error = self.fatal[name]
                said = f"where the model raises {error}, artifacts fail"
                where = f"the model does not raise {error} ({decision.place})"
                asserted(marks[name], decision.value, where)
            elif name in self._alone:
                said = f"the way of {decision.value} is in the programs, artifacts fail where it "
                said += (
                    f"comes out otherwise, of which no program could be made: {self._alone[name]}"
                )
                asserted(marks[name], decision.value, f"{decision.place} comes to {decision.value}")
            else:
                said = "it changes nothing that is returned, and is left out"
            told.setdefault(decision.place, []).append(said)
        unmark(graph, marks.keys())
        graph.eliminate_dead_code()
        exported = rebuilt(exported, graph, exported.graph_signature.input_specs)
        both = sorted(self.both | (self.seen.keys() & self._guarding.keys()))
        places = tuple(dict.fromkeys(self.seen[name].place for name in both))
        sentences = tuple(
            f"{place} decides by a value: {first}" + (f" ({len(more)} times more)" if more else "")
            for place, (first, *more) in told.items()
        )
        return replace(
            program,
            exported=exported,
            decided=(*program.decided, *sentences),
            both_ways=(*program.both_ways, *places),
        )


def _compare(program: Program, decision: Decision, run: Run, called: Called) -> None:
    """Hold a program against the model where a decision comes out otherwise than it would.

    Raises:
        Inseparable: they differ.
    """
    try:
        _, expected = run({decision.name: not decision.value})
    except _RefusedError:  # it cannot go that way here
        return
    exported = program.exported
    graph = copy.deepcopy(exported.graph)
    predicate = marked(graph)[decision.name].args[0]
    with graph.inserting_after(predicate):
        otherwise = graph.call_function(aten.logical_not.default, (predicate,))
    otherwise.meta["val"] = predicate.meta["val"]
    for node in regions(graph):
        if node.args[0] is predicate:
            node.update_arg(0, otherwise)
    for node in marked(graph).values():
        graph.erase_node(node)
    exported = rebuilt(exported, graph, exported.graph_signature.input_specs)
    found = called(replace(program, exported=exported))
    if not all(close(ours, theirs, 0.0) for ours, theirs in zip(found, expected, strict=True)):
        raise Inseparable("by one of its ways a program gives something else than the model")


def _always(program: Program) -> set[str]:
    """The names of the decisions that come out alike at every call: by constants and buffers."""
    found: set[Any] = set()
    exported = program.exported
    same_each_time = {
        spec.arg.name
        for spec in exported.graph_signature.input_specs
        if spec.kind in (InputKind.CONSTANT_TENSOR, InputKind.BUFFER)
    }
    for node in exported.graph.nodes:
        if node.op == "placeholder":
            same = node.name in same_each_time
        else:
            same = bool(node.all_input_nodes) and found.issuperset(node.all_input_nodes)
        if same:
            found.add(node)
    marks = marked(exported.graph)
    return {name for name, mark in marks.items() if mark.args[0] in found}


@contextmanager
def noted(answers: Mapping[str, bool], ends: Ending | None = None) -> Iterator[list[Decision]]:
    """The decisions that code makes meanwhile, some of which come out as told, by name.

    What is asked again of the very same is no other decision.

    Args:
        answers: what these come to.
        ends: what others come to, which are about how many turns a loop takes.
    """
    found: list[Decision] = []
    known: list[Tensor] = []

    def answer(condition: Tensor, frame: FrameType) -> bool:
        if ends and (asked := ends(condition, frame)) is not None:
            return asked.value
        if (before := _place_in(known, condition)) is not None:
            return found[before].value
        place = place_of(frame)
        decision = _next(found, place, bool(condition))
        value = answers.get(decision.name, decision.value)
        found.append(replace(decision, value=value))
        known.append(condition)
        return value

    with answered(answer):
        yield found


@contextmanager
def following(decisions: Sequence[Decision], ends: Ending | None = None) -> Iterator[None]:
    """In a capture: code decides as told meanwhile, which is marked in the graph.

    Args:
        decisions: all of them, in their order.
        ends: as of `noted`.

    Raises:
        Inseparable: it makes other decisions.
    """
    known: list[Tensor] = []

    def answer(condition: Tensor, frame: FrameType) -> bool:
        if ends and (asked := ends(condition, frame)) is not None:
            ASSERT(condition, marker(asked.name))
            return asked.value
        if (before := _place_in(known, condition)) is not None:
            return decisions[before].value
        decision = decisions[len(known)] if len(known) < len(decisions) else None
        place = place_of(frame)
        known.append(condition)
        if decision is None or decision.place != place:
            raise Inseparable(f"{place} is reached in a capture only")
        ASSERT(condition, marker(decision.name))
        return decision.value

    with answered(answer, unknown=True):
        yield


def _place_in(known: Sequence[Tensor], condition: Tensor) -> int | None:
    return next((i for i, each in enumerate(known) if each is condition), None)


def _next(before: Sequence[Decision], place: str, value: bool) -> Decision:
    return Decision(place, sum(decision.place == place for decision in before), value)


def place_of(frame: FrameType) -> str:
    """Where model code is, `file:line`, that a call is made in."""
    frame = users_frame(frame)
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
