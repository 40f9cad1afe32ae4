"""What the turns of a loop leave behind it, and tensors that each writes its part of."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fuseport.exporter.program.loops._turns import (
    STACK,
    Argument,
    Inside,
    Moving,
    Size,
    State,
    Turns,
)
from fuseport.exporter.program.sizes.of_graph import Unlike

__all__ = ["Buffer", "Last", "Stacked", "buffers", "fixed", "uses"]

aten = torch.ops.aten


@dataclass(frozen=True)
class Last:
    """What takes a node of the last turn."""

    user: fx.Node
    node: fx.Node
    made: Inside


@dataclass(frozen=True)
class Stacked:
    """What stacks something of all turns; `before` of those before the first like others."""

    user: fx.Node
    before: tuple[fx.Node, ...]
    made: Argument


def uses(turns: Turns) -> Iterator[Last | Stacked]:
    """What takes something of the turns.

    Raises:
        Unlike: something of one turn alone is taken, and that is not the last.
    """
    users = dict.fromkeys(user for node in turns.all_nodes for user in node.users)
    for user in users:
        if turns.at(user) is not None or user.target is aten.sym_size.int:
            continue
        if user.target is STACK:
            listed: Any = user.args[0]
            before = tuple(listed[: turns.first])
            yield Stacked(user, before, turns.argument(listed[turns.first :]))
            continue
        for node in dict.fromkeys(pytree.tree_leaves((user.args, user.kwargs))):
            if (place := turns.at(node)) is not None:
                if place[0] != turns.taken - 1:
                    raise Unlike("something of a turn before the last is taken behind it")
                yield Last(user, node, Inside(place[1]))


@dataclass(frozen=True)
class Buffer:
    """A tensor that each turn writes its part of, and none reads: what it is before the loop."""

    first: fx.Node
    part: Argument
    dim: int
    along: Moving


def buffers(turns: Turns) -> dict[int, Buffer]:
    """The tensors that each turn writes its part of, by the place of the node that does."""
    found: dict[int, Buffer] = {}
    for at, (node, (leaves, _)) in enumerate(zip(turns.nodes, turns.arguments, strict=True)):
        match node.target, leaves:
            case aten.select_scatter.default, [State(own, first), part, dim, Moving() as along]:
                others = [
                    other
                    for place, (given, _) in enumerate(turns.arguments)
                    for other in given
                    if isinstance(other, Inside | State) and other.at == at and place != at
                ]
                same = first.meta["val"].shape == node.meta["val"].shape
                if own == at and not others and same:
                    dims = node.meta["val"].dim()
                    found[at] = Buffer(first, part, fixed(dim) % dims, along)
    return found


def fixed(argument: Argument) -> Any:
    """The number that an argument is."""
    if isinstance(argument, Size) and argument.expr.is_Integer:
        return int(argument.expr)
    raise Unlike("a dimension or a step in it is no number")
