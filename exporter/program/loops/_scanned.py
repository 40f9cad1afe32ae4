"""Turns of a loop, as `scan`."""

import operator
from collections.abc import Mapping
from typing import Any

import sympy  # type: ignore[import-untyped]  # it has no types
import torch
from torch import fx

from fuseport.exporter.program.loops._left import Buffer, Last, Stacked, buffers, uses
from fuseport.exporter.program.loops._turn import Number, Slice, Turn
from fuseport.exporter.program.loops._turns import (
    Argument,
    Inside,
    Moving,
    State,
    Turns,
)
from fuseport.exporter.program.provenance import within
from fuseport.exporter.program.regions import SCAN, added
from fuseport.exporter.program.sizes.bounds import not_negative
from fuseport.exporter.program.sizes.of_graph import Sizes, Unlike

__all__ = ["scanned"]

aten = torch.ops.aten

_CONTIGUOUS: Any = {"memory_format": torch.contiguous_format}


def scanned(module: fx.GraphModule, turns: Turns, sizes: Sizes) -> None:
    """Put a `scan` behind the turns of a loop, and what it gives in the place of what they do.

    Args:
        module: whose graph has them; gets the graph of one turn.
        turns: what they do. They stay, and nothing takes of them what it took.
        sizes: of that graph.

    Raises:
        Unlike: there is no `scan` that does what they do.
    """
    _Loop(module, turns, sizes).write()


class _Loop(Turn):
    """A `scan` in the making."""

    def __init__(self, module: fx.GraphModule, turns: Turns, sizes: Sizes) -> None:
        super().__init__(module, turns, sizes)
        self._slices: dict[Slice | Number, fx.Node] = {}
        self._buffers = buffers(turns)

    def write(self) -> None:
        turns, taken = self._turns, list(uses(self._turns))
        for at, node in enumerate(turns.nodes):
            if at in self._buffers:
                self._made[at] = self._resolved(self._buffers[at].part)
            elif at not in turns.once:
                self._made[at] = self._copied(node, *turns.arguments[at])
        kept = {use.made: self._resolved(use.made) for use in taken if self._is_kept(use)}
        if not self._slices:
            self._given(Number(Moving(sympy.Integer(0), 1)))
        states, stacked = self._called(kept)
        for use in taken:
            if isinstance(use, Stacked):
                use.user.replace_all_uses_with(self._all_of(use, stacked[use.made]))
                self._module.graph.erase_node(use.user)
            elif use.made in stacked and use.made.at in self._buffers:
                filled = self._filled(stacked[use.made], self._buffers[use.made.at])
                use.user.replace_input_with(use.node, filled)
            elif use.made.at in turns.once:
                use.user.replace_input_with(use.node, self._outside_of(use.made))
            elif use.made in stacked:
                last = self._outside(aten.select.int, stacked[use.made], 0, -1)
                use.user.replace_input_with(use.node, last)
            else:
                use.user.replace_input_with(use.node, states[use.made.at])

    def _is_kept(self, use: Last | Stacked) -> bool:
        """Whether the loop has to give for it what all turns make."""
        if isinstance(use, Stacked):
            if isinstance(use.made, Inside | State) and use.made.at in self._buffers:
                raise Unlike("a tensor that each turn writes a part of is taken of each")
            return True
        if use.made.at in self._buffers:
            return True
        if use.made.at in self._turns.once:
            return False
        if any(state.at == use.made.at for state in self._states):
            return False
        if self._turns.first:
            raise Unlike("what the last turn makes is taken, and its first does not make it")
        return True

    def _given(self, key: Slice | Number) -> fx.Node:
        if key not in self._slices:
            if isinstance(key, Slice):
                value = key.of.meta["val"]
                with self._sizes.mode:
                    value = value.new_empty([s for i, s in enumerate(value.shape) if i != key.dim])
            else:
                with self._sizes.mode:
                    value = torch.empty((), dtype=torch.int64, device=self._device)
            self._slices[key] = self._placeholder(f"slice_{len(self._slices)}", value)
        return self._slices[key]

    def _slice_outside(self, key: Slice | Number) -> fx.Node:
        """All parts that the turns are given, stacked in the first dimension."""
        count, along = self._turns.count, key.along
        if isinstance(key, Number):
            numbers = self._outside(aten.arange.default, count, device=self._device)
            numbers = self._outside(aten.mul.Tensor, numbers, along.step)
            return self._outside(aten.add.Tensor, numbers, along.first)
        start, end = self._ends(along)
        x, value = key.of, key.of.meta["val"]
        if key.dim:
            others = [i for i in range(value.dim()) if i != key.dim]
            x = self._outside(aten.permute.default, x, [key.dim, *others])
        size = value.shape[key.dim]
        size = sympy.Integer(size) if isinstance(size, int) else size.node.expr
        if start != 0 or end != size or abs(along.step) != 1:
            x = self._outside(aten.slice.Tensor, x, 0, start, end, abs(along.step))
        if along.step < 0:
            x = self._outside(aten.flip.default, x, [0])
        return x

    def _ends(self, along: Moving) -> tuple[Any, Any]:
        """Of the places that something moves along, the first, and what is behind the last."""
        last = sympy.expand(along.first + along.step * (self._turns.count - 1))
        low, high = (along.first, last) if along.step > 0 else (last, along.first)
        if not not_negative(self._sizes.value(low), least=1):
            raise Unlike("it may go over places before the first")
        return low, high + 1

    def _called(
        self, kept: Mapping[Argument, fx.Node]
    ) -> tuple[dict[int, fx.Node], dict[Argument, fx.Node]]:
        """What the loop gives: the last of the states, by place, and what is kept of all turns."""
        states = [*self._states]
        firsts = [self._outside(aten.clone.default, each.first, **_CONTIGUOUS) for each in states]
        lasts = [self._resolved(Inside(state.at)) for state in states]
        placeholders = [*self._states.values()]
        if not states:  # a scan has one
            firsts = [self._outside(aten.zeros.default, [1], device=self._device)]
            lasts = placeholders = [self._placeholder("state_0", firsts[0].meta["val"])]
        slices = [self._slice_outside(key) for key in self._slices]
        stacked = [*kept.values()]
        if not any(_is_real(node) for node in stacked):
            # Torch differentiates a scan by one that goes over what this one kept: something.
            real = (node for node in lasts if _is_real(node))
            stacked += [self._call_within(aten.sum.default, node) for node in real][:1]
        self._end.args = (tuple(self._whole(node) for node in (*lasts, *stacked)),)
        self._give_sizes()
        others = *self._shared.values(), *self._sizes_given.values()
        order = [*placeholders, *self._slices.values(), *others]
        for placeholder in reversed(order):
            next(iter(self._body.nodes)).prepend(placeholder)
        self._body.eliminate_dead_code()
        self._body.lint()
        call = self._outside_call(firsts, slices)
        count = self._sizes.value(self._turns.count)
        values = [node.meta["val"] for node in stacked]
        with self._sizes.mode:
            whole = [value.new_empty((count, *value.shape)) for value in values]
        call.meta["val"] = (*(node.meta["val"] for node in lasts), *whole)
        count_of_all = len(lasts) + len(kept)
        results = [self._outside(operator.getitem, call, i) for i in range(count_of_all)]
        given = {state.at: result for state, result in zip(states, results, strict=False)}
        return given, dict(zip(kept, results[len(lasts) :], strict=True))

    def _outside_call(self, firsts: list[fx.Node], slices: list[fx.Node]) -> fx.Node:
        name = added(self._module, fx.GraphModule(self._module, self._body), "turns")
        sizes = (self._sizes.node(symbol, self._turns.end) for symbol in self._sizes_given)
        others = *self._apart(slices), *sizes
        with self._module.graph.inserting_before(self._turns.end):
            body = self._module.graph.get_attr(name)
            call = self._module.graph.call_function(SCAN, (body, firsts, slices, others))
        within(call, self._turns.nodes[0])
        return call

    def _all_of(self, use: Stacked, stacked: fx.Node) -> fx.Node:
        """What is stacked, behind what a first turn that is unlike the others made of it."""
        if not use.before:
            return stacked
        before = [self._outside(aten.unsqueeze.default, node, 0) for node in use.before]
        return self._outside(aten.cat.default, [*before, stacked])

    def _filled(self, parts: fx.Node, buffer: Buffer) -> fx.Node:
        """A tensor that each turn wrote a part of."""
        start, end = self._ends(buffer.along)
        if buffer.along.step < 0:
            parts = self._outside(aten.flip.default, parts, [0])
        dims = buffer.first.meta["val"].dim()
        order = [*range(1, buffer.dim + 1), 0, *range(buffer.dim + 1, dims)]
        parts = self._outside(aten.permute.default, parts, order)
        return self._outside(
            *(aten.slice_scatter.default, buffer.first, parts, buffer.dim, start, end),
            abs(buffer.along.step),
        )


def _is_real(node: fx.Node) -> bool:
    return bool(node.meta["val"].is_floating_point())
