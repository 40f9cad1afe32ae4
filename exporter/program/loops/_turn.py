"""What one turn of a loop does, as a graph of its own."""

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymInt, Tensor, fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from fuseport.exporter.program.loops._left import fixed
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
from fuseport.exporter.program.sizes.of_graph import Sizes, Unlike

__all__ = ["Number", "Slice", "Turn"]

aten = torch.ops.aten

_CONTIGUOUS: Any = {"memory_format": torch.contiguous_format}


@dataclass(frozen=True)
class Slice:
    """A part of a tensor for each turn, one after the other, without the dimension they lie in."""

    of: fx.Node
    dim: int
    along: Moving


@dataclass(frozen=True)
class Number:
    """The number of a turn, or one that moves with it."""

    along: Moving


class Turn(ABC):
    """A graph of one turn, in the making, and what the loop around it is given.

    Args:
        module: whose graph has the turns of the loop.
        turns: what they do.
        sizes: of that graph.
    """

    def __init__(self, module: fx.GraphModule, turns: Turns, sizes: Sizes) -> None:
        self._module, self._turns, self._sizes = module, turns, sizes
        self._body = fx.Graph()
        self._end = self._body.output(())
        self._within = Sizes(self._body, sizes.mode, self._size)
        self._made: dict[int, fx.Node] = {}  # of one turn
        self._once: dict[int, fx.Node] = {}  # what is the same for all turns, outside
        self._states: dict[State, fx.Node] = {}
        self._shared: dict[fx.Node, fx.Node] = {}
        self._sizes_given: dict[Any, fx.Node] = {}  # by their symbols
        tensors = (x for x in pytree.tree_leaves([n.meta["val"] for n in turns.nodes]))
        self._device = next((x.device for x in tensors if isinstance(x, Tensor)), None)

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
                return self._given(Number(argument))
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
                number = self._given(Number(along))
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
            return self._given(Slice(whole, dim % whole.meta["val"].dim(), along))
        index = self._call_within(aten.reshape.default, self._given(Number(along)), [1])
        part = self._call_within(aten.index_select.default, self._resolved(x), dim, index)
        return self._call_within(aten.squeeze.dim, part, dim)

    def _written(self, x: Argument, part: fx.Node, dim: int, along: Moving) -> fx.Node:
        whole = self._resolved(x)
        value = whole.meta["val"]
        dim %= value.dim()
        number = self._given(Number(along))
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

    @abstractmethod
    def _given(self, key: Slice | Number) -> fx.Node:
        """A part of a tensor, or a number, that each turn has another of."""

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

    def _apart(self, others: Sequence[fx.Node]) -> Iterator[fx.Node]:
        """What is shared, as no views of each other or of others, which torch's loops refuse."""
        seen = {_viewed(node) for node in others}
        for node in self._shared:
            of = _viewed(node)
            yield self._outside(aten.clone.default, node, **_CONTIGUOUS) if of in seen else node
            seen.add(of)

    def _give_sizes(self) -> None:
        """Have the turn be given the sizes of all its tensors."""
        for symbol in _symbols(self._body):
            self._size(symbol)


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


def _symbols(graph: fx.Graph) -> list[Any]:
    """Those of the sizes of all tensors in a graph."""
    values = [node.meta.get("val") for node in graph.nodes]
    sizes: list[Any] = [size for x in values if isinstance(x, Tensor) for size in x.shape]
    exprs = [size.node.expr for size in sizes if isinstance(size, SymInt)]
    return sorted({symbol for expr in exprs for symbol in expr.free_symbols}, key=str)
