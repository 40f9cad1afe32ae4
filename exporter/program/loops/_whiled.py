"""Turns of a loop, as `while_loop`."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fuseport.exporter.program.loops._turn import Number, Slice, Turn
from fuseport.exporter.program.loops._turns import Argument, Inside, Shared, State, Turns
from fuseport.exporter.program.provenance import within
from fuseport.exporter.program.regions import WHILE, added
from fuseport.exporter.program.sizes.of_graph import Sizes, Unlike

__all__ = ["Behind", "whiled"]

aten = torch.ops.aten

Behind = tuple[Any, fx.Node]
"""What is taken behind a loop, as a node of the last turn of a few, and what it is after none."""


def whiled(
    module: fx.GraphModule,
    turns: Turns,
    sizes: Sizes,
    going: Behind,
    taken: Sequence[Behind],
    most: int | None,
    exactly: int | None,
) -> list[fx.Node]:
    """Put a `while_loop` behind the turns of a loop.

    Args:
        module: whose graph has them; gets the graphs of one turn, and of whether there is another.
        turns: what they do. They stay.
        sizes: of that graph.
        going: whether there is another turn.
        taken: what else is taken behind them.
        most: how many turns there may be; None if any number.
        exactly: how many there are, whatever the values; None if these say.

    Returns:
        What the loop gives in the place of `going`, and of each of `taken`.

    Raises:
        Unlike: there is no loop that does what they do.
    """
    return _Loop(module, turns, sizes, most, exactly).written([going, *taken])


class _Loop(Turn):
    """A `while_loop` in the making."""

    def __init__(
        self,
        module: fx.GraphModule,
        turns: Turns,
        sizes: Sizes,
        most: int | None,
        exactly: int | None,
    ) -> None:
        super().__init__(module, turns, sizes)
        self._most, self._exactly = most, exactly
        self._numbers: dict[Slice | Number, fx.Node] = {}
        self._turn: fx.Node | None = None  # the number of one

    def written(self, taken: Sequence[Behind]) -> list[fx.Node]:
        turns = self._turns
        for at, node in enumerate(turns.nodes):
            if at not in turns.once:
                self._made[at] = self._copied(node, *turns.arguments[at])
        left = [(self._resolved(self._argument(node)), first) for node, first in taken]
        states = {placeholder: state for state, placeholder in self._states.items()}
        carried: list[tuple[fx.Node, fx.Node, fx.Node]] = [  # in a turn, before it, behind it
            (place, state.first, self._resolved(Inside(state.at)))
            for place, state in states.items()
        ]
        results = [self._carried(carried, *each) for each in left]
        if self._most is not None or self._exactly is not None or self._turn is not None:
            none = self._outside(aten.full.default, [], 0, dtype=torch.int64, device=self._device)
            turn = self._number()
            carried.append((turn, none, self._call_within(aten.add.Tensor, turn, 1)))
        loop = self._called(carried, carried[results[0]][0])
        return [self._outside(operator.getitem, loop, at) for at in results]

    def _argument(self, node: fx.Node) -> Argument:
        """What is taken behind the turns, in terms of the last of them."""
        place = self._turns.at(node)
        if place is None:
            return Shared(node)
        turn, at = place
        if turn == self._turns.taken - 1:
            return Inside(at)
        arguments = (each for given, _ in self._turns.arguments for each in given)
        states = [each for each in arguments if isinstance(each, State) and each.at == at]
        if turn != self._turns.taken - 2 or not states:
            raise Unlike("something of a turn before the last is taken behind it")
        return states[0]

    def _carried(
        self, carried: list[tuple[fx.Node, fx.Node, fx.Node]], left: Any, first: fx.Node
    ) -> int:
        """The place of what is carried from turn to turn: that a turn leaves, and what is first."""
        signature = [(node.meta["val"].shape, node.meta["val"].dtype) for node in (left, first)]
        if signature[0] != signature[1]:
            raise Unlike("what is behind it has other sizes where it takes no turn")
        for at, (_, before, behind) in enumerate(carried):
            if behind is left and before is first:
                return at
        carried.append((self._placeholder(f"left_{len(carried)}", left.meta["val"]), first, left))
        return len(carried) - 1

    def _number(self) -> fx.Node:
        if self._turn is None:
            with self._sizes.mode:
                value = torch.empty((), dtype=torch.int64, device=self._device)
            self._turn = self._placeholder("number", value)
        return self._turn

    def _given(self, key: Slice | Number) -> fx.Node:
        if key not in self._numbers:
            self._numbers[key] = self._moved(key)
        return self._numbers[key]

    def _moved(self, key: Slice | Number) -> fx.Node:
        if isinstance(key, Slice):
            at = self._call_within(aten.reshape.default, self._given(Number(key.along)), [1])
            whole = self._share(key.of)
            part = self._call_within(aten.index_select.default, whole, key.dim, at)
            return self._call_within(aten.squeeze.dim, part, key.dim)
        number = self._call_within(aten.mul.Tensor, self._number(), key.along.step)
        return self._call_within(aten.add.Tensor, number, key.along.first)

    def _called(
        self, carried: Sequence[tuple[fx.Node, fx.Node, fx.Node]], going: fx.Node
    ) -> fx.Node:
        firsts = [
            self._outside(aten.clone.default, first, **_CONTIGUOUS) for _, first, _ in carried
        ]
        self._end.args = (tuple(self._whole(left) for _, _, left in carried),)
        self._give_sizes()
        inside = [*(each for each, _, _ in carried)]
        others = [*self._shared.values(), *self._sizes_given.values()]
        for placeholder in reversed([*inside, *others]):
            next(iter(self._body.nodes)).prepend(placeholder)
        self._body.eliminate_dead_code()
        self._body.lint()
        bodies = [self._condition([*inside, *others], going), self._body]
        sizes = (self._sizes.node(symbol, self._turns.end) for symbol in self._sizes_given)
        given = tuple(firsts), (*self._apart([]), *sizes)
        names = [
            added(self._module, fx.GraphModule(self._module, body), "until") for body in bodies
        ]
        graph = self._module.graph
        with graph.inserting_before(self._turns.end):
            call = graph.call_function(WHILE, (*map(graph.get_attr, names), *given))
        within(call, self._turns.nodes[0])
        call.meta["val"] = tuple(first.meta["val"] for first in firsts)
        return call

    def _condition(self, given: Sequence[fx.Node], going: fx.Node) -> fx.Graph:
        """Whether there is another turn, given what a turn is."""
        graph = fx.Graph()
        made: dict[fx.Node, fx.Node] = {}
        for each in given:
            made[each] = graph.placeholder(each.name)
            made[each].meta["val"] = each.meta["val"]
        end = graph.output(())
        sizes = Sizes(graph, self._sizes.mode)
        most = self._most if self._exactly is None else self._exactly
        asked = made[going]
        if most is not None:
            less = sizes.call(end, aten.lt.Scalar, made[self._number()], most)
            asked = sizes.call(end, aten.logical_and.default, asked, less)
            asked = asked if self._exactly is None else less
        end.args = (sizes.call(end, aten.clone.default, asked),)
        graph.eliminate_dead_code()
        return graph


_CONTIGUOUS: Any = {"memory_format": torch.contiguous_format}
