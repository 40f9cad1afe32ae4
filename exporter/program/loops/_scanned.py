"""Turns of a loop, as `scan`."""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]  # it has no types
import torch
from torch import SymInt, Tensor, fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from fuseport.exporter.program.loops._left import Buffer, Last, Stacked, buffers, fixed, uses
from fuseport.exporter.program.loops._turns import (
    Argument,
    Inside,
    Moving,
    Plain,
    Shared,
    Size,
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


@dataclass(frozen=True)
class _Slice:
    """A part of a tensor for each turn, one after the other, without the dimension they lie in."""

    of: fx.Node
    dim: int
    along: Moving


@dataclass(frozen=True)
class _Number:
    """The number of a turn, or one that moves with it."""

    along: Moving


class _Loop:
    """A `scan` in the making."""

    def __init__(self, module: fx.GraphModule, turns: Turns, sizes: Sizes) -> None:
        self._module, self._turns, self._sizes = module, turns, sizes
        self._body = fx.Graph()
        self._end = self._body.output(())
        self._within = Sizes(self._body, sizes.mode, self._size)
        self._made: dict[int, fx.Node] = {}  # of one turn
        self._once: dict[int, fx.Node] = {}  # what is the same for all turns, outside
        self._states: dict[State, fx.Node] = {}
        self._slices: dict[_Slice | _Number, fx.Node] = {}
        self._shared: dict[fx.Node, fx.Node] = {}
        self._sizes_given: dict[Any, fx.Node] = {}  # by their symbols
        self._buffers = buffers(turns)
        tensors = (x for x in pytree.tree_leaves([n.meta["val"] for n in turns.nodes]))
        self._device = next((x.device for x in tensors if isinstance(x, Tensor)), None)

    def write(self) -> None:
        turns, taken = self._turns, list(uses(self._turns))
        for at, node in enumerate(turns.nodes):
            if at in self._buffers:
                self._made[at] = self._resolved(self._buffers[at].part)
            elif at not in turns.once:
                self._made[at] = self._copied(node, *turns.arguments[at])
        kept = {use.made: self._resolved(use.made) for use in taken if self._is_kept(use)}
        if not self._slices:
            self._given(_Number(Moving(sympy.Integer(0), 1)))
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

    # What a turn does.

    def _copied(self, node: fx.Node, leaves: Sequence[Argument], nested: Any) -> fx.Node:
        if any(isinstance(leaf, Moving) for leaf in leaves):
            return self._moving(node, *pytree.tree_unflatten(list(leaves), nested))
        args, kwargs = pytree.tree_unflatten([*map(self._resolved, leaves)], nested)
        with self._body.inserting_before(self._end):
            copied = self._body.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        copied.meta = dict(node.meta)
        return copied

    def _resolved(self, argument: Argument) -> Any:
        match argument:
            case Inside(at) if at in self._turns.once:
                return self._share(self._outside_of(argument))
            case Inside(at):
                return self._made[at]
            case State():
                return self._state(argument)
            case Shared(node):
                return self._share(node)
            case Size(expr):
                return self._within.node(expr, self._end)
            case Moving():
                return self._given(_Number(argument))
        return argument.value

    def _moving(self, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
        """What a node makes of a number that moves."""
        kwargs = {name: self._resolved(argument) for name, argument in kwargs.items()}
        if kwargs and node.target not in _WITH_TENSOR:
            raise Unlike(f"{node.target} is given a number that changes from turn to turn")
        match node.target, args:
            case aten.select.int, (x, Plain() | Size() as dim, Moving() as along):
                made = self._part(x, fixed(dim), along)
            case aten.slice.Tensor, (x, dim, Moving() as along, to, *step):
                self._one_long(along, to, step)
                made = self._call_within(
                    aten.unsqueeze.default, self._part(x, fixed(dim), along), fixed(dim)
                )
            case aten.select_scatter.default, (x, part, dim, Moving() as along):
                made = self._written(x, self._resolved(part), fixed(dim), along)
            case aten.slice_scatter.default, (x, part, dim, Moving() as along, to, *step):
                self._one_long(along, to, step)
                dim = fixed(dim)
                part = self._call_within(aten.select.int, self._resolved(part), dim, 0)
                made = self._written(x, part, dim, along)
            case target, (x, Moving() as along, *others) if target in _WITH_TENSOR:
                others = [self._resolved(each) for each in others]
                number = self._given(_Number(along))
                made = self._call_within(
                    _WITH_TENSOR[target], self._resolved(x), number, *others, **kwargs
                )
            case _:
                raise Unlike(f"{node.target} is given a number that changes from turn to turn")
        value, wanted = made.meta["val"], node.meta["val"]
        if value.dtype != wanted.dtype:
            made = self._call_within(aten.to.dtype, made, wanted.dtype)
        within(made, node)
        return made

    @staticmethod
    def _one_long(along: Moving, to: Argument, step: Sequence[Argument]) -> None:
        one = isinstance(to, Moving) and (to.step, to.first - along.first) == (along.step, 1)
        if not one or any(fixed(each) != 1 for each in step):
            raise Unlike("parts in it that move are longer than 1")

    def _part(self, x: Argument, dim: int, along: Moving) -> fx.Node:
        if isinstance(x, Shared) or (isinstance(x, Inside) and x.at in self._turns.once):
            whole = self._outside_of(x)
            return self._given(_Slice(whole, dim % whole.meta["val"].dim(), along))
        index = self._call_within(aten.reshape.default, self._given(_Number(along)), [1])
        part = self._call_within(aten.index_select.default, self._resolved(x), dim, index)
        return self._call_within(aten.squeeze.dim, part, dim)

    def _written(self, x: Argument, part: fx.Node, dim: int, along: Moving) -> fx.Node:
        whole = self._resolved(x)
        value = whole.meta["val"]
        dim %= value.dim()
        number = self._given(_Number(along))
        size = value.shape[dim]
        size = self._within.node(size.node.expr, self._end) if not isinstance(size, int) else size
        places = self._call_within(aten.arange.default, size, device=value.device)
        places = self._call_within(
            aten.reshape.default, places, [-1 if i == dim else 1 for i in range(value.dim())]
        )
        here = self._call_within(aten.eq.Tensor, places, number)
        part = self._call_within(aten.unsqueeze.default, part, dim)
        return self._call_within(aten.where.self, here, part, whole)

    def _call_within(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self._within.call(self._end, target, *args, **kwargs)

    def _whole(self, node: fx.Node) -> fx.Node:
        """A tensor that is no other's memory, and contiguous."""
        return self._call_within(aten.clone.default, node, **_CONTIGUOUS)

    # What it is given.

    def _placeholder(self, name: str, value: Any) -> fx.Node:
        first = next(iter(self._body.nodes))
        with self._body.inserting_before(first):
            made = self._body.placeholder(name)
        made.meta["val"] = value
        return made

    def _state(self, state: State) -> fx.Node:
        if state not in self._states:
            name = f"state_{len(self._states)}"
            made = self._turns.nodes[state.at].meta["val"]
            first = state.first.meta["val"]
            if (first.shape, first.dtype) != (made.shape, made.dtype):
                raise Unlike(
                    "what a turn leaves to the next is of other sizes than before the loop"
                )
            self._states[state] = self._placeholder(name, made)
        return self._states[state]

    def _share(self, node: fx.Node) -> fx.Node:
        if node.op == "get_attr":
            with self._body.inserting_before(self._end):
                return self._body.get_attr(str(node.target))
        if not isinstance(node.meta.get("val"), Tensor):
            raise Unlike("it takes something of before it that is no tensor")
        if node not in self._shared:
            name = f"shared_{len(self._shared)}"
            self._shared[node] = self._placeholder(name, node.meta["val"])
        return self._shared[node]

    def _size(self, symbol: Any) -> fx.Node:
        """A size, as one turn is given it.

        Torch's `scan` has a gradient only if sizes that its turns ask for are among what is given.
        """
        if symbol not in self._sizes_given:
            name = f"size_{len(self._sizes_given)}"
            self._sizes_given[symbol] = self._placeholder(name, self._sizes.value(symbol))
        return self._sizes_given[symbol]

    def _given(self, key: _Slice | _Number) -> fx.Node:
        if key not in self._slices:
            if isinstance(key, _Slice):
                value = key.of.meta["val"]
                with self._sizes.mode:
                    value = value.new_empty([s for i, s in enumerate(value.shape) if i != key.dim])
            else:
                with self._sizes.mode:
                    value = torch.empty((), dtype=torch.int64, device=self._device)
            self._slices[key] = self._placeholder(f"slice_{len(self._slices)}", value)
        return self._slices[key]

    # What stands in the graph around it.

    def _outside(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self._sizes.call(self._turns.end, target, *args, **kwargs)

    def _outside_of(self, argument: Argument) -> Any:
        """What is the same for all turns, outside."""
        match argument:
            case Shared(node):
                return node
            case Size(expr):
                return self._sizes.node(expr, self._turns.end)
            case Plain(value):
                return value
        assert isinstance(argument, Inside)
        if argument.at not in self._once:
            node = self._turns.nodes[argument.at]
            leaves, nested = self._turns.arguments[argument.at]
            args, kwargs = pytree.tree_unflatten([*map(self._outside_of, leaves)], nested)
            self._once[argument.at] = self._outside(node.target, *args, **kwargs)
            within(self._once[argument.at], node)
        return self._once[argument.at]

    def _slice_outside(self, key: _Slice | _Number) -> fx.Node:
        """All parts that the turns are given, stacked in the first dimension."""
        count, along = self._turns.count, key.along
        if isinstance(key, _Number):
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
        for symbol in _symbols(self._body):
            self._size(symbol)
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

    def _apart(self, slices: Sequence[fx.Node]) -> Iterator[fx.Node]:
        """What is shared, as no views of each other or of what turns have a part of: torch's `scan`
        refuses these."""
        seen = {_viewed(node) for node in slices}
        for node in self._shared:
            of = _viewed(node)
            yield self._outside(aten.clone.default, node, **_CONTIGUOUS) if of in seen else node
            seen.add(of)

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


_WITH_TENSOR = {
    aten.add.Tensor: aten.add.Tensor,
    aten.sub.Tensor: aten.sub.Tensor,
    aten.mul.Tensor: aten.mul.Tensor,
    aten.div.Tensor: aten.div.Tensor,
    aten.eq.Scalar: aten.eq.Tensor,
    aten.ne.Scalar: aten.ne.Tensor,
    aten.lt.Scalar: aten.lt.Tensor,
    aten.le.Scalar: aten.le.Tensor,
    aten.gt.Scalar: aten.gt.Tensor,
    aten.ge.Scalar: aten.ge.Tensor,
}


def _viewed(node: fx.Node) -> fx.Node:
    """The tensor that a node gives a view of; itself where it gives none."""
    while node.target is operator.getitem or _is_view(node.target):
        whole = node.args[0]
        assert isinstance(whole, fx.Node)
        node = whole
    return node


def _is_view(target: Any) -> bool:
    returns = target._schema.returns if isinstance(target, OpOverload) else ()
    return any(each.alias_info is not None for each in returns)


def _is_real(node: fx.Node) -> bool:
    return bool(node.meta["val"].is_floating_point())


def _symbols(graph: fx.Graph) -> list[Any]:
    """Those of the sizes of all tensors in a graph."""
    values = [node.meta.get("val") for node in graph.nodes]
    sizes: list[Any] = [size for x in values if isinstance(x, Tensor) for size in x.shape]
    exprs = [size.node.expr for size in sizes if isinstance(size, SymInt)]
    return sorted({symbol for expr in exprs for symbol in expr.free_symbols}, key=str)
