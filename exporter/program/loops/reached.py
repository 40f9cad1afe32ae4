"""Loops that are left by values, of which captures have some turns, as `while_loop`.

What a turn does is told by a capture that has a few. What there is behind the loop after no turn,
is told by one that has none: what both do from there on, is done to what the loop gives. Where a
loop ends by itself after as many turns, a capture that has them all tells what comes then.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from fuseport.exporter.program import Program, rebuilt
from fuseport.exporter.program.joining import keep_guards, sort
from fuseport.exporter.program.loops._aligned import (
    BEHIND,
    OTHERWISE,
    Aligned,
    conditions,
    detach_where_used,
    mark_name,
    turns_of,
)
from fuseport.exporter.program.loops._whiled import whiled
from fuseport.exporter.program.matching import (
    Inseparable,
    constants_once,
    mode_of,
    with_constants,
)
from fuseport.exporter.program.sizes.of_graph import Sizes, Unlike

__all__ = ["Condition", "Loop", "Reached", "Unreached"]

aten = torch.ops.aten


class Unreached(Inseparable):
    """A loop until a value is reached cannot be captured as one."""

    def __init__(self, place: str, why: str) -> None:
        said = f"the loop that {place} ends cannot be captured for any number of turns: {why}"
        super().__init__(said)


@dataclass(frozen=True)
class Condition:
    """What code asks for, to know if a loop goes on.

    Attributes:
        place: `file:line`.
        loop: its number.
        turn: how many turns were taken before.
        at: which of several that are asked one after another.
        value: what it comes to.
        goes_on: what it comes to where the loop goes on.
    """

    place: str
    loop: int
    turn: int
    at: int
    value: bool
    goes_on: bool

    @property
    def name(self) -> str:
        """What its mark is called in a capture."""
        return mark_name(self.loop, self.turn, self.at, self.goes_on, self.place)


@dataclass(frozen=True)
class Loop:
    """A loop that is left by a value.

    Attributes:
        place: of what asks if it goes on, `file:line`.
        none: the program where it takes no turn.
        ended: the program where it takes all turns that it has if no value ends it.
        most: how many times it may go on in that one; None as `ended` where it has no end.
    """

    place: str
    none: Program
    ended: Program | None = None
    most: int | None = None


class Reached:
    """A program with loops that are left by values, of which it has a few turns each.

    Args:
        some: the program.
        loops: the loops, in its order.

    Raises:
        Unreached: one cannot be captured as a loop of any number of turns.
    """

    def __init__(self, some: Program, loops: Sequence[Loop]) -> None:
        self._some, self._loops = some, loops
        exported = some.exported
        for loop in loops:
            for other in filter(None, (loop.none, loop.ended)):
                exported = with_constants(exported, other.exported)
                keep_guards(exported, other.exported)
        exported = constants_once(_apart(exported))
        self._exported = _copied(exported)
        aligned: list[Aligned] = []
        stands: dict[fx.Node, fx.Node] = {}
        for number, loop in enumerate(loops):
            with _about(loop):
                ended = None if loop.ended is None else _apart(loop.ended.exported)
                none = _apart(loop.none.exported)
                aligned.append(Aligned(exported, number, none, ended))
        for each, loop in zip(aligned, loops, strict=True):
            with _about(loop):
                each.apply(self._exported, stands)
        sort(self._exported.graph)

    def program(self, exactly: Mapping[int, int] | None = None) -> Program:
        """The program with loops of any number of turns.

        Args:
            exactly: how many of them some take, by number, whatever the values.

        Raises:
            Unreached: one cannot be captured as such a loop.
        """
        exported = _copied(self._exported)
        module, graph = exported.graph_module, exported.graph
        sizes = Sizes(graph, mode_of(graph))
        for number, loop in enumerate(self._loops):
            with _about(loop):
                _roll(module, number, loop.most, sizes, (exactly or {}).get(number))
        graph.eliminate_dead_code()
        graph.lint()
        module.recompile()
        exported = rebuilt(exported, graph, exported.graph_signature.input_specs)
        return replace(self._some, exported=exported)


@contextmanager
def _about(loop: Loop) -> Iterator[None]:
    """Within, that turns are not alike is said of a loop."""
    try:
        yield
    except Unlike as error:
        raise Unreached(loop.place, str(error)) from None


def _copied(exported: ExportedProgram) -> ExportedProgram:
    module = copy.deepcopy(exported.graph_module)
    return rebuilt(exported, module.graph, exported.graph_signature.input_specs)


def _apart(exported: ExportedProgram) -> ExportedProgram:
    """A copy, in which each turn detaches what it takes of others."""
    copied = _copied(exported)
    detach_where_used(copied.graph)
    return copied


def _roll(
    module: fx.GraphModule, loop: int, most: int | None, sizes: Sizes, exactly: int | None
) -> None:
    """Put a `while_loop` in the place of a loop's turns."""
    graph = module.graph
    marks = [mark for ((mark, _),) in conditions(graph, loop)]
    turns = turns_of(module, marks)
    taken = [
        node for node in graph.find_nodes(op="call_function", target=BEHIND) if node.args[2] == loop
    ]
    going: Any = (marks[-1].args[0], marks[0].args[0])
    given = [(node.args[0], node.args[1]) for node in taken]
    _, *results = whiled(module, turns, sizes, going, given, most, exactly)
    for node, result in zip(taken, results, strict=True):
        if exactly is not None and node.args[:2] == going:
            result = sizes.call(node, aten.full.default, [], exactly == most, dtype=torch.bool)
        node.replace_all_uses_with(result)
        graph.erase_node(node)
    for mark in marks:
        graph.erase_node(mark)
    inside = {*turns.all_nodes}
    for node in inside:
        if any(u not in inside and u.target is not aten.sym_size.int for u in node.users):
            raise Unlike(OTHERWISE)
    turns.erase(sizes)
