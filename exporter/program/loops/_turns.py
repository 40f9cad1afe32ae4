"""What the turns of a loop do, that a capture has a few of."""

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from fuseport.exporter.program._drawing import acts, draws
from fuseport.exporter.program.matching import ASSERT, marks, plain, region_key
from fuseport.exporter.program.sizes.of_graph import Sizes, Unlike, expr_of, is_size

__all__ = [
    "STACK",
    "TURN",
    "TURNS",
    "Argument",
    "Inside",
    "Moving",
    "Plain",
    "Shared",
    "Size",
    "State",
    "Turns",
    "next_turn",
    "stack_turns",
]

aten = torch.ops.aten

TURNS = 4
"""Of a loop, as many as a capture has."""


@torch.library.custom_op("fuseport_capture::stack", mutates_args=())
def stack_turns(turns: list[Tensor], count: int, loop: int) -> Tensor:
    """What each turn of a loop makes, of which a capture has a few, stacked of all: (count, …)."""
    raise NotImplementedError("a loop of which there are a few turns computes nothing")


@stack_turns.register_fake
def _(turns: list[Tensor], count: int, loop: int) -> Tensor:
    return turns[0].new_empty((count, *turns[0].shape))


@torch.library.custom_op("fuseport_capture::next_turn", mutates_args=())
def next_turn(count: int, made: list[Tensor]) -> Tensor:
    """How many turns a loop has. Of what the turn before made, nothing is left out of the graph."""
    raise NotImplementedError("a loop of which there are a few turns computes nothing")


@next_turn.register_fake
def _(count: int, made: list[Tensor]) -> Tensor:
    return made[0].new_empty((), dtype=torch.bool)


TURN = torch.ops.fuseport_capture.next_turn.default
STACK = torch.ops.fuseport_capture.stack.default


@dataclass(frozen=True)
class Inside:
    """What its own turn makes: the node at that place in a turn."""

    at: int


@dataclass(frozen=True)
class State:
    """What the turn before made, at a place there; in the first turn, `first`."""

    at: int
    first: fx.Node


@dataclass(frozen=True)
class Shared:
    """A tensor, or a graph inside, that is the same for all turns."""

    node: fx.Node


@dataclass(frozen=True)
class Size:
    """A number or size that is the same for all turns."""

    expr: Any


@dataclass(frozen=True)
class Moving:
    """A number or size that goes up by the same from turn to turn."""

    first: Any
    step: int


@dataclass(frozen=True)
class Plain:
    """Something else that is the same for all turns."""

    value: Any


Argument = Inside | State | Shared | Size | Moving | Plain


class Turns:
    """What the turns of a loop do.

    Args:
        module: whose graph has them.
        marks: where each begins, and where the last ends.
        count: how many there are in truth: an expression.

    Attributes:
        first: the turn that those behind it are like.
        taken: how many the capture has from that one on.
        count: how many there are in truth.
        nodes: of that turn, in their order, but for sizes.
        arguments: of each of the nodes, what it takes, flat; and how that is nested.
        once: the places of the nodes that compute the same in all turns.
        end: the node behind the turns.

    Raises:
        Unlike: they are not alike.
    """

    def __init__(self, module: fx.GraphModule, marks: Sequence[fx.Node], count: Any) -> None:
        self._module = module
        self.end = marks[-1]
        self.first = 0
        every = [_between(*pair) for pair in itertools.pairwise(marks)]
        try:
            self._take(every)
        except Unlike:
            self._take_without_unused(every)
        self.nodes = self._lists[self.first]
        self.taken = len(self._lists) - self.first
        self.once = self._the_same()
        self.count = count - self.first

    def at(self, node: Any) -> tuple[int, int] | None:
        """Of a node of the turns from `first` on: which, counted from that, and its place there."""
        turn, at = self._at.get(node, (-1, -1)) if isinstance(node, fx.Node) else (-1, -1)
        return (turn - self.first, at) if turn >= self.first else None

    def node(self, turn: int, at: int) -> fx.Node:
        """The node of a turn, counted from `first`, at a place there."""
        return self._lists[self.first + turn][at]

    @property
    def all_nodes(self) -> list[fx.Node]:
        """Of all turns from `first` on."""
        return [node for nodes in self._lists[self.first :] for node in nodes]

    def erase(self, sizes: Sizes) -> None:
        """Erase the turns; sizes of what they made are those of something else."""
        nodes = self.all_nodes
        for node in nodes:
            for user in list(node.users):
                if user.target is aten.sym_size.int:
                    if user.users:
                        user.replace_all_uses_with(_elsewhere(sizes, user))
                    user.graph.erase_node(user)
        for node in reversed(nodes):
            node.graph.erase_node(node)

    def _take(self, lists: list[list[fx.Node]]) -> None:
        self._lists = lists
        self._at = {
            node: (turn, at) for turn, nodes in enumerate(lists) for at, node in enumerate(nodes)
        }
        self.arguments = self._alike()

    def _take_without_unused(self, every: list[list[fx.Node]]) -> None:
        """Take no notice of what nothing uses, of which the first turn may leave less; else the
        turns behind it are alike."""
        unused = _unused(every)
        try:
            self._take([[node for node in nodes if node not in unused] for nodes in every])
        except Unlike:
            self.first = 1
            self._take(every)
            return
        for node in unused:
            node.graph.erase_node(node)

    def _the_same(self) -> set[int]:
        found: set[int] = set()
        for at, (node, (given, _)) in enumerate(zip(self.nodes, self.arguments, strict=True)):
            fixed = all(
                isinstance(each, Size | Plain)
                or (isinstance(each, Shared) and each.node.op != "get_attr")
                or (isinstance(each, Inside) and each.at in found)
                for each in given
            )
            if fixed and not draws(node):
                found.add(at)
        return found

    def _alike(self) -> list[tuple[list[Argument], Any]]:
        turns = self._lists[self.first :]
        if len({len(nodes) for nodes in turns}) > 1:
            raise Unlike("its turns do not do the same")
        return [self._of_nodes(nodes) for nodes in zip(*turns, strict=True)]

    def _of_nodes(self, nodes: Sequence[fx.Node]) -> tuple[list[Argument], Any]:
        if len({node.target for node in nodes}) > 1:
            raise Unlike("its turns do not do the same")
        flat = [pytree.tree_flatten((node.args, node.kwargs)) for node in nodes]
        if len({str(nested) for _, nested in flat}) > 1:
            raise Unlike("its turns do not do the same")
        if len(set(map(_signature, nodes))) > 1:
            raise Unlike(f"the sizes of {nodes[0].target} change from turn to turn")
        leaves = zip(*(leaves for leaves, _ in flat), strict=True)
        return [self.argument(values) for values in leaves], flat[0][1]

    def argument(self, values: Sequence[Any]) -> Argument:
        """What an argument is, given what it is in each turn."""
        if all(map(is_size, values)):
            return _of_sizes([expr_of(value) for value in values])
        if not all(isinstance(value, fx.Node) for value in values):
            if len({plain(value) for value in values}) > 1:
                raise Unlike("a number in it changes from turn to turn")
            return Plain(values[0])
        if all(value.op == "get_attr" for value in values):
            bodies = {region_key(getattr(self._module, value.target)) for value in values}
            if len(bodies) > 1:
                raise Unlike("its turns do not do the same")
            return Shared(values[0])
        return self._of_tensors(values)

    def _of_tensors(self, values: Sequence[fx.Node]) -> Argument:
        places = [self.at(value) for value in values]
        if not any(places):
            if len(set(values)) > 1:
                raise Unlike("its turns take other tensors each")
            return Shared(values[0])
        turns = [None if place is None else place[0] for place in places]
        at = {place[1] for place in places if place is not None}
        if len(at) == 1 and turns == [*range(len(values))]:
            return Inside(at.pop())
        if len(at) == 1 and turns == [None, *range(len(values) - 1)]:
            return State(at.pop(), values[0])
        raise Unlike("its turns take more of others than what the one before left")


def _between(mark: fx.Node, after: fx.Node) -> list[fx.Node]:
    """The nodes of a turn: neither sizes nor what holds how many turns there are."""
    found = []
    node = mark.next
    while node is not after:
        if node.meta.get("unbacked_bindings"):
            raise Unlike("a size in it hangs on values")
        if node.target is ASSERT:
            place = (marks(node) or "").rpartition(", ")[0] or "what torch asserts"
            raise Unlike(f"{place} in it decides by values")
        value = node.meta.get("val")
        if node.op == "call_function" and node.target is not TURN and not _is_number(value):
            found.append(node)
        node = node.next
    return _in_order(found)


def _unused(lists: Sequence[Sequence[fx.Node]]) -> dict[fx.Node, None]:
    """Those of some nodes that nothing takes but others of these, users first."""
    found: dict[fx.Node, None] = {}
    nodes = {*itertools.chain(*lists)}
    for node in reversed(next(iter(nodes)).graph.nodes) if nodes else ():
        if node in nodes and found.keys() >= node.users.keys() and not acts(node):
            found[node] = None
    return found


_OUTSIDE = (-1, "")


def _in_order(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Nodes in an order that hangs on what they compute alone.

    Where a tensor is written to, a capture asks for parts of it later than where none is yet.
    """
    keys: dict[fx.Node, tuple[int, str]] = {}
    for node in nodes:
        flat, nested = pytree.tree_flatten((node.args, node.kwargs))
        given = [
            keys.get(each, _OUTSIDE) if isinstance(each, fx.Node) else _OUTSIDE for each in flat
        ]
        said = repr((str(node.target), str(nested), given))
        depth = max((depth for depth, _ in given), default=-1) + 1
        keys[node] = depth, hashlib.sha256(said.encode()).hexdigest()
    return sorted(nodes, key=keys.__getitem__)


def _is_number(value: Any) -> bool:
    numbers = torch.SymInt | torch.SymFloat | torch.SymBool | int | float
    return value is None or isinstance(value, numbers)


def _of_sizes(exprs: Sequence[Any]) -> Argument:
    steps = {after - before for before, after in itertools.pairwise(exprs)}
    if len(steps) > 1 or not all(step.is_Integer for step in steps):
        raise Unlike("a number or a size in it changes from turn to turn")
    (step,) = steps
    return Moving(exprs[0], int(step)) if step else Size(exprs[0])


def _signature(node: fx.Node) -> str:
    values = pytree.tree_leaves(node.meta.get("val"))
    return str([(tuple(v.shape), v.dtype) if isinstance(v, Tensor) else v for v in values])


def _elsewhere(sizes: Sizes, user: fx.Node) -> Any:
    """The size that a node is, where what it is asked of will be gone."""
    try:
        return sizes.node(expr_of(user), user)
    except Unlike:
        raise AssertionError("a size of a turn is one of nothing before it") from None
