"""What is taken behind loops that are left by values, as captures of other numbers of turns say."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]  # it has no types
import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from fuseport.exporter.program._drawing import acts
from fuseport.exporter.program._needed import needed
from fuseport.exporter.program.joining import Region, either
from fuseport.exporter.program.loops._turns import Shared, State, Turns
from fuseport.exporter.program.matching import (
    Matched,
    evaluate,
    marked,
    mode_of,
    plain,
    region_key,
)
from fuseport.exporter.program.sizes.of_graph import Sizes, Unlike, expr_of, is_size

__all__ = [
    "BEHIND",
    "OTHERWISE",
    "Aligned",
    "conditions",
    "detach_where_used",
    "mark_name",
    "turns_of",
]

aten = torch.ops.aten

_UNTIL = "until "
"""What the names of marks begin with that stand for conditions of loops."""

OTHERWISE = "what is computed behind it hangs on how many turns it takes"


@torch.library.custom_op("fuseport_capture::behind", mutates_args=())
def _behind(some: Tensor, none: Tensor, loop: int) -> Tensor:
    """What is taken behind a loop: in a capture of some turns, and in one of none."""
    raise NotImplementedError("a loop of which there are a few turns computes nothing")


@_behind.register_fake
def _(some: Tensor, none: Tensor, loop: int) -> Tensor:
    return torch.empty_like(some)


BEHIND = torch.ops.fuseport_capture.behind.default


def mark_name(loop: int, turn: int, at: int, goes_on: bool, place: str) -> str:
    """What a condition's mark is called in a capture; see `reached.Condition`."""
    return f"{_UNTIL}{loop} {turn} {at} {goes_on:d} {place}"


def conditions(graph: fx.Graph, loop: int) -> list[list[tuple[fx.Node, bool]]]:
    """The marks of what is asked before each turn of a loop, and what that comes to there."""
    found: dict[int, list[tuple[fx.Node, bool]]] = {}
    for name, mark in marked(graph).items():
        if name.startswith(f"{_UNTIL}{loop} "):
            _, _, turn, _, goes_on, _ = name.split(" ", 5)
            found.setdefault(int(turn), []).append((mark, goes_on == "1"))
    return [found[turn] for turn in sorted(found)]


def _once_each(graph: fx.Graph, loop: int) -> list[fx.Node]:
    """Have one mark stand before each turn of a loop, of whether it goes on: those."""
    sizes = Sizes(graph, mode_of(graph))
    every = conditions(graph, loop)
    left: list[fx.Node] = []
    for asked in every:
        *before, (last, _) = asked
        going: Any = None
        for mark, goes_on in asked:
            condition: Any = mark.args[0]
            if not goes_on:
                condition = sizes.call(last, aten.logical_not.default, condition)
            if going is not None:
                condition = sizes.call(last, aten.logical_and.default, going, condition)
            going = condition
        for mark, _ in before:
            graph.erase_node(mark)
        last.update_arg(0, going)
        left.append(last)
    return left


def detach_where_used(graph: fx.Graph) -> None:
    """Have each turn detach what it takes of others: before a mark, what is detached for turns
    behind it hangs on what these are."""
    marks = {*marked(graph).values()}
    begun: list[fx.Node] = []  # where each part between marks begins
    part: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node in marks or not begun:
            begun.append(node)
        part[node] = len(begun) - 1
    for node in graph.find_nodes(op="call_function", target=aten.detach.default):
        others = {part[user] for user in node.users if user not in marks} - {part[node]}
        for number in others:
            with graph.inserting_after(begun[number]):
                again = graph.node_copy(node)
            for user in [user for user in node.users if part.get(user) == number]:
                if user not in marks:
                    user.replace_input_with(node, again)
        if not node.users:
            graph.erase_node(node)


@dataclass(frozen=True)
class _Use:
    """What something behind the loop is given, in one program and in another."""

    user: str
    at: int  # among its arguments, flat
    one: fx.Node
    other: fx.Node


class Aligned:
    """A loop, and what is taken behind it.

    Args:
        exported: a program with a few turns of it.
        number: of the loop.
        none: the program with no turn, which is changed.
        ended: the program with all turns, if it ends by itself, which is changed.

    Raises:
        Unlike: they do not do the same behind the loop.
    """

    def __init__(
        self,
        exported: ExportedProgram,
        number: int,
        none: ExportedProgram,
        ended: ExportedProgram | None,
    ) -> None:
        self._number = number
        self._none = Matched(exported, none)
        self._after_none = [*self._uses(self._none)]
        self._ended = None if ended is None else Matched(exported, ended)
        self._after_all = [] if self._ended is None else [*self._uses(self._ended)]

    def _uses(self, matched: Matched) -> Iterator[_Use]:
        """What both programs do the same to behind the loop, but not to the same."""
        behind = [_behind_loop(graph, self._number) for graph in (matched.one, matched.other)]
        ours, theirs = (marked(graph) for graph in (matched.one, matched.other))
        waiting = [(matched.one.output_node(), matched.other.output_node())]
        for name, mark in ours.items():
            if mark in behind[0]:
                if name not in theirs:
                    raise Unlike(OTHERWISE)
                waiting.append((mark, theirs[name]))
        seen: set[Any] = set()
        while waiting:
            pair = waiting.pop()
            if pair in seen:
                continue
            seen.add(pair)
            user = pair[0].name
            for at, (a, b) in enumerate(_arguments(*pair)):
                if not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
                    if not _is_same_size(a, b) and plain(a) != plain(b):
                        raise Unlike(OTHERWISE)
                elif matched.met(a, b) or _is_same_size(a, b):
                    continue
                elif a in behind[0] and b in behind[1] and a.target is b.target:
                    waiting.append((a, b))
                elif isinstance(a.meta.get("val"), Tensor) and isinstance(b.meta["val"], Tensor):
                    yield _Use(user, at, a, b)
                else:
                    raise Unlike(OTHERWISE)

    def apply(self, exported: ExportedProgram, stands: dict[fx.Node, fx.Node]) -> None:
        """Have what is taken behind the loop be marked in a program.

        Args:
            exported: the one with a few turns.
            stands: for nodes of turns, what they are behind their loops; gets this one's.

        Raises:
            Unlike: it is not told by the programs.
        """
        marking = _Marking(exported.graph_module, self._number, stands)
        for use in self._after_none:
            marking.mark(use, self._none)
        if self._ended is not None:
            marking.end(self._after_all, self._ended)
        stands |= marking.own


class _Marking:
    """What is taken behind a loop, in the making.

    Args:
        module: whose graph has a few turns of it.
        number: of the loop.
        stands: for nodes of other loops' turns, what they are behind these.

    Attributes:
        own: for nodes of its turns, what they are behind it.
    """

    def __init__(
        self, module: fx.GraphModule, number: int, stands: Mapping[fx.Node, fx.Node]
    ) -> None:
        self._module, self._number, self._stands = module, number, stands
        self._nodes = {node.name: node for node in module.graph.nodes}
        self._marks = _once_each(module.graph, number)
        self._turns = turns_of(module, self._marks)
        self._known = _before(module.graph, self._marks[0])
        self._taken: dict[tuple[fx.Node, fx.Node], fx.Node] = {}
        self._brought: dict[fx.Node, fx.Node] = {}
        self.own: dict[fx.Node, fx.Node] = {}

    def mark(self, use: _Use, none: Matched) -> None:
        """Mark what something takes, of which the other program has what there is after no turn."""
        some = self._nodes[use.one.name]
        if some not in self._known and self._turns.at(some) is None:  # it is computed behind
            raise Unlike(OTHERWISE)
        self._give(use, self._behind(self._stands.get(some, some), self._bring(use.other, none)))

    def end(self, uses: Sequence[_Use], ended: Matched) -> None:
        """Have what is taken be what the other program has, where no value ended the loop."""
        there, turns = ended.other_module, self._turns
        marks = _once_each(ended.other, self._number)
        every = turns_of(there, marks)
        _hold_alike(turns, every, ended)
        places = ((turns, self._nodes[use.one.name], every, use.other) for use in uses)
        differing = [
            use
            for use, (ours, one, theirs, other) in zip(uses, places, strict=True)
            if (place := _from_last(ours, one)) is None or place != _from_last(theirs, other)
        ]
        if not differing:
            return
        known = _before(ended.other, marks[0])
        shared: dict[fx.Node, fx.Node] = {}

        def computed_of(node: fx.Node) -> list[fx.Node]:
            if (place := _from_last(every, node)) is not None:
                shared[node] = self._of_last(*place)
            elif node in known and isinstance(node.meta.get("val"), Tensor):
                shared[node] = self._bring(node, ended)
            else:
                return node.all_input_nodes
            return []

        needed((use.other for use in differing), computed_of)
        now = [self._given(use) for use in differing]
        here = Region(self._module, {node: node for node in now})
        goes_on = self._behind(*(_condition(self._marks[at]) for at in (-1, 0)))
        for real in (False, True):
            pairs = [pair for pair in zip(differing, now, strict=True) if _is_real(pair[1]) is real]
            if pairs:
                with self._module.graph.inserting_before(self._module.graph.output_node()):
                    chosen = either(
                        self._module,
                        goes_on,
                        (Region(there, shared), [use.other for use, _ in pairs]),
                        (here, [node for _, node in pairs]),
                        differentiable=real,
                    )
                for (use, _), node in zip(pairs, chosen, strict=True):
                    self._give(use, node)

    def _behind(self, some: fx.Node, none: fx.Node) -> fx.Node:
        """What is taken behind the loop, as the nodes of it after some turns and after none."""
        if (some, none) not in self._taken:
            graph = self._module.graph
            with graph.inserting_after(self._marks[-1]):
                made = graph.call_function(BEHIND, (some, none, self._number))
            made.meta["val"] = some.meta["val"]
            self._taken[some, none] = made
            if self._turns.at(some) is not None:
                self.own.setdefault(some, made)
        return self._taken[some, none]

    def _of_last(self, back: int, at: int) -> fx.Node:
        """What is behind the loop of its last turn, or of one before; see `_from_last`."""
        if back > self._turns.taken:
            raise Unlike(OTHERWISE)
        some = self._turns.node(self._turns.taken - back, at)
        if some in self.own:
            return self.own[some]
        value, graph = some.meta["val"], self._module.graph
        nothing = Sizes(graph, mode_of(graph)).call(
            self._marks[0],
            *(aten.full.default, [expr_of(size) for size in value.shape], 0),
            dtype=value.dtype,
            device=value.device,
        )
        return self._behind(some, nothing)

    def _bring(self, node: fx.Node, matched: Matched) -> fx.Node:
        """A node of the other program's, in this one, before the loop."""
        known = matched.common.get(node)
        if known is not None:
            here = self._nodes[known.name]
            return self._stands.get(here, here)
        if node not in self._brought:
            if node.op != "call_function" or acts(node):
                raise Unlike(OTHERWISE)
            graph = self._module.graph
            given = {each: self._bring(each, matched) for each in node.all_input_nodes}
            with graph.inserting_before(self._marks[0]):
                made = graph.node_copy(node, given.__getitem__)
            evaluate(made, mode_of(graph))
            self._brought[node] = made
        return self._brought[node]

    def _given(self, use: _Use) -> fx.Node:
        user = self._nodes[use.user]
        given: fx.Node = pytree.tree_leaves((user.args, user.kwargs))[use.at]
        return self._stands.get(given, given)

    def _give(self, use: _Use, node: fx.Node) -> None:
        user = self._nodes[use.user]
        flat, spec = pytree.tree_flatten((user.args, user.kwargs))
        flat[use.at] = node
        user.args, user.kwargs = pytree.tree_unflatten(flat, spec)


def turns_of(module: fx.GraphModule, marks: Sequence[fx.Node]) -> Turns:
    turns = Turns(module, marks, sympy.Integer(0))
    if turns.first:
        raise Unlike("its first turn does otherwise than the others")
    return turns


def _from_last(turns: Turns, node: fx.Node) -> tuple[int, int] | None:
    """How many turns before the end of a loop a node is, 1 in its last, and its place there."""
    place = turns.at(node)
    return None if place is None else (turns.taken - place[0], place[1])


def _hold_alike(some: Turns, all_: Turns, matched: Matched) -> None:
    """Raises Unlike where a few turns of a loop do otherwise than all of them."""

    def same(one: Any, other: Any) -> bool:
        if not isinstance(one, Shared) or not isinstance(other, Shared):
            if isinstance(one, State) and isinstance(other, State):
                return one.at == other.at
            return bool(one == other)
        if one.node.op == other.node.op == "get_attr":
            ours, theirs = matched.module, matched.other_module
            keys = (getattr(m, str(n.target)) for m, n in ((ours, one.node), (theirs, other.node)))
            return len({region_key(each) for each in keys}) == 1
        known = matched.common.get(other.node)
        return known is not None and known.name == one.node.name

    pairs = [*zip(some.nodes, all_.nodes, strict=False)]
    alike = len(some.nodes) == len(all_.nodes) and all(a.target is b.target for a, b in pairs)
    for (ours, _), (theirs, _) in zip(some.arguments, all_.arguments, strict=False):
        alike = alike and len(ours) == len(theirs) and all(map(same, ours, theirs))
    if not alike:
        raise Unlike("its later turns do otherwise than the first few")


def _arguments(a: fx.Node, b: fx.Node) -> Iterator[tuple[Any, Any]]:
    (ours, spec), (theirs, other) = (pytree.tree_flatten((n.args, n.kwargs)) for n in (a, b))
    if spec != other:
        raise Unlike(OTHERWISE)
    return zip(ours, theirs, strict=True)


def _is_same_size(a: Any, b: Any) -> bool:
    return is_size(a) and is_size(b) and str(expr_of(a)) == str(expr_of(b))


def _is_real(node: fx.Node) -> bool:
    return bool(node.meta["val"].is_floating_point())


def _before(graph: fx.Graph, end: fx.Node) -> set[fx.Node]:
    return {*itertools.takewhile(lambda node: node is not end, graph.nodes)}


def _behind_loop(graph: fx.Graph, loop: int) -> set[fx.Node]:
    """The nodes of a graph that stand behind a loop, without what it returns."""
    last, _ = conditions(graph, loop)[-1][-1]
    before = {*_before(graph, last), last}
    return {node for node in graph.nodes if node not in before and node.op == "call_function"}


def _condition(mark: fx.Node) -> fx.Node:
    condition = mark.args[0]
    assert isinstance(condition, fx.Node)
    return condition
