"""Loops of which a capture has a few turns, one after the other, as `scan` over all of them.

All turns but the first must do the same: by the same operators, to what the turn before left (a
state), to parts of a tensor that lie one after the other (slices), to the turn's number, or to what
is the same for all. What all turns leave, in a list that is stacked or in a tensor that each writes
its part of, is stacked. A first turn that does something else stays before the loop.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.program import rebuilt
from fuseport.exporter.program._needed import needed
from fuseport.exporter.program.loops._scanned import scanned
from fuseport.exporter.program.loops._turns import STACK, TURNS, Turns, next_turn, stack_turns
from fuseport.exporter.program.matching import ASSERT, constants_once, mode_of
from fuseport.exporter.program.sizes.of_graph import Sizes, Unlike, expr_of

__all__ = ["END", "TURNS", "Unrolled", "next_turn", "rolled", "stack_turns", "turn_marker"]

aten = torch.ops.aten

END = -1
"""The number of what comes after the last turn."""

_MARK = "turn "
_WHOLE = 2**63 - 1
_ALL: tuple[Any, ...] = (None, None, 1)  # start, end and step of a slice, unasked


def turn_marker(loop: int, turn: int, place: str) -> str:
    """The message of the assertion that stands, in a capture, before a turn or after the last.

    What it asserts is no condition, but how many turns there are in all.
    """
    return f"{_MARK}{loop} {turn} {place}"


def rolled(exported: ExportedProgram) -> ExportedProgram:
    """A program whose loops take all of their turns.

    Raises:
        ExportFailed: the turns of one are not alike.
    """
    if not _marks(exported.graph):
        return exported
    exported = constants_once(exported)
    graph = exported.graph
    marks = _marks(graph)
    for mark in marks:
        mark.let_go()
    for node in graph.find_nodes(op="call_function", target=aten._assert_tensor_metadata.default):
        graph.erase_node(node)  # as of `y.to(x.dtype)`: of what a turn made, it is no use of it
    sizes = Sizes(graph, mode_of(graph))
    _take_out_whole_views(graph)
    _take_by_index(graph, sizes)
    _take_along(graph)
    while marks := _marks(graph):
        _roll(exported.graph_module, _innermost(marks), sizes)
    graph.eliminate_dead_code()
    graph.lint()
    exported.graph_module.recompile()
    return rebuilt(exported, graph, exported.graph_signature.input_specs)


@dataclass(frozen=True)
class _Mark:
    """Where a turn begins, or the loop ends."""

    node: fx.Node
    loop: int
    turn: int
    place: str

    @property
    def count(self) -> Any:
        """How many turns there are: an expression."""
        turn: Any = self.node.args[0]
        return expr_of(turn.args[0])

    def let_go(self) -> None:
        """Have it hold nothing of the turn before."""
        turn: Any = self.node.args[0]
        turn.update_arg(1, [])

    def erase(self) -> None:
        """Take it out of its graph, with how many turns there are."""
        turn: Any = self.node.args[0]
        self.node.graph.erase_node(self.node)
        turn.graph.erase_node(turn)


def _marks(graph: fx.Graph) -> list[_Mark]:
    """Those of a graph, in its order."""
    found = []
    for node in graph.nodes:
        if node.target is ASSERT and (said := str(node.args[1])).startswith(_MARK):
            loop, turn, place = said.removeprefix(_MARK).split(" ", 2)
            found.append(_Mark(node, int(loop), int(turn), place))
    return found


def _innermost(marks: Sequence[_Mark]) -> list[_Mark]:
    """The marks of a loop that has no other within; the last is its end.

    Another that goes round with it, as in `zip`, has a mark in each turn: those are erased.
    """
    end = next((mark for mark in marks if mark.turn == END), None)
    if end is None:
        raise _failed(marks[0].place, _LEFT)
    own = [mark for mark in marks if mark.loop == end.loop]
    if [mark.turn for mark in own] != [*range(TURNS), END]:
        raise _failed(end.place, _LEFT)
    turn = -1
    for mark in marks[marks.index(own[0]) : marks.index(end)]:
        if mark.loop == end.loop:
            turn += 1
        elif mark.turn != turn or mark.count != end.count:
            raise _failed(mark.place, _LEFT)
        else:
            mark.erase()
    return own


_LEFT = "it is left before its end, or goes round beside another of another length"


class Unrolled(ExportFailed):
    """A loop over a dynamic size cannot be captured as one."""


def _failed(place: str, why: str) -> Unrolled:
    return Unrolled(f"the loop at {place} cannot be captured for any number of turns: {why}")


def _take_out_whole_views(graph: fx.Graph) -> None:
    """Take out slices of all there is, and what is written to all there is."""
    for node in list(graph.nodes):
        if node.target is aten.slice.Tensor and _is_all(node.args[2:]):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target is aten.slice_scatter.default and _is_all(node.args[3:]):
            node.replace_all_uses_with(node.args[1])
            graph.erase_node(node)


_ITEMS = (aten.item.default, aten._local_scalar_dense.default)


def _take_by_index(graph: fx.Graph, sizes: Sizes) -> None:
    """Have parts that the value of a tensor says, `x[i]`, taken and written by that tensor.

    A number that hangs on values has no form within a loop.
    """
    for node in list(graph.nodes):
        if node.target not in (aten.select.int, aten.select_scatter.default):
            continue
        x, *source, dim, number = node.args
        if not isinstance(number, fx.Node) or number.target not in _ITEMS:
            continue
        at: Any = number.args[0]
        if at.meta["val"].dim():
            at = sizes.call(number, aten.reshape.default, at, [])
        index = [*[None] * (dim % x.meta["val"].dim()), at]
        target = aten.index_put.default if source else aten.index.Tensor
        node.replace_all_uses_with(sizes.call(node, target, x, index, *source))
        graph.erase_node(node)
        if not number.users:
            graph.erase_node(number)


def _take_along(graph: fx.Graph) -> None:
    """Have turns do what is done behind a loop to what they made, before that is stacked."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    marks = _marks(graph)
    for stacked in graph.find_nodes(op="call_function", target=STACK):
        turns: Any = stacked.args[0]
        own = [mark for mark in marks if mark.loop == stacked.args[2]]
        behind = _behind(turns, order, order[own[-1].node])
        hang: set[fx.Node] = set()  # of them, on what turns made
        within = range(order[own[0].node], order[own[-1].node])
        for node in behind:
            if any(order[each] in within or each in hang for each in node.all_input_nodes):
                hang.add(node)
        for node in behind:
            if node not in hang:
                own[0].node.prepend(node)
        for turn, made in enumerate(turns):
            for node in _behind([made], order, order[own[-1].node]):
                if node in hang:
                    own[turn + 1].node.prepend(node)


def _behind(nodes: Sequence[fx.Node], order: Mapping[fx.Node, int], place: int) -> list[fx.Node]:
    """What some nodes are computed of that stands behind a place, in order, with themselves."""

    def behind(given: Iterable[fx.Node]) -> list[fx.Node]:
        return [node for node in given if order[node] > place]

    found = needed(behind(nodes), lambda node: behind(node.all_input_nodes))
    return sorted(found, key=order.__getitem__)


def _is_all(bounds: Sequence[Any]) -> bool:
    start, end, step = [*bounds, *_ALL[len(bounds) :]]
    return start in (None, 0) and end in (None, _WHOLE) and step == 1


def _roll(module: fx.GraphModule, marks: Sequence[_Mark], sizes: Sizes) -> None:
    """Put a `scan` in the place of the turns between some marks."""
    try:
        turns = Turns(module, [mark.node for mark in marks], marks[0].count)
        # A scan has a step. That it holds for sizes at which there is one is among its guards.
        bool(sizes.value(turns.count) >= 1)
        scanned(module, turns, sizes)
    except Unlike as error:
        raise _failed(marks[0].place, str(error)) from None
    turns.erase(sizes)
    for mark in marks:
        mark.erase()
