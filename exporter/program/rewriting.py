"""Graphs rewritten node by node: what an operator is replaced by is traced, and no more."""

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._C import DispatchKey
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from fuseport.exporter.program import mutates
from fuseport.exporter.program.provenance import within
from fuseport.exporter.program.sizes.bounds import not_negative

__all__ = ["Rewriting", "Table", "Whole", "is_composite"]

aten = torch.ops.aten
_SIZE = aten.sym_size.int

Table = Mapping[Any, Callable[..., Any]]
"""Operators, each with a function that computes the same from the same arguments. One that returns
NotImplemented leaves the operator where it is."""


def is_composite(operator: Any) -> bool:
    """Whether it is an operator that torch computes by others, whatever the tensors are."""
    composite = DispatchKey.CompositeImplicitAutograd
    return isinstance(operator, OpOverload) and operator.has_kernel_for_dispatch_key(composite)


class Rewriting:
    """A graph that is made of another one, node by node. ONNX has no form of `sym_numel`.

    Attributes:
        graph: the new one.
        values: nodes of the old graph → nodes of the new, or trees of them.
    """

    def __init__(self, mode: Any, table: Table) -> None:
        """Begin with a graph that is empty, of fakes of a mode."""
        self.graph = fx.Graph()
        self.values: dict[fx.Node, Any] = {}
        self._mode, self._table = mode, table
        self._sizes: dict[tuple[fx.Node, int], fx.Node] = {}

    def run(self, graph: fx.Graph) -> None:
        """Go over a graph."""
        for node in graph.nodes:
            self.values[node] = self.of(node)

    def of(self, node: fx.Node) -> Any:
        """What `node` becomes: a copy, or what the table says; a tuple of its several results."""
        if node.target is operator.getitem:
            call, index = node.args
            assert isinstance(call, fx.Node)
            if isinstance(self.values[call], tuple):
                return self.values[call][index]
        if node.target is aten.sym_numel.default:
            (x,) = node.all_input_nodes
            return self._count(self.values[x])
        # Of nothing, which has a size of 0, no more is computed: not worth a check of all others.
        if node.target is operator.floordiv and not not_negative(_value(node.args[0]), least=1):
            return self._rounded_down(node)
        form = self.form(node)
        if form is not None:
            try:
                return self._inlined(node, form)
            except _Left:
                pass
        return self.graph.node_copy(node, self.values.__getitem__)

    def form(self, node: fx.Node) -> Callable[..., Any] | None:
        """What computes the same as `node` does; None where that stays."""
        return self._table.get(node.target)

    def _inlined(self, node: fx.Node, form: Callable[..., Any]) -> Any:
        flat, spec = pytree.tree_flatten((node.args, node.kwargs))
        positions = [i for i, value in enumerate(flat) if isinstance(value, fx.Node)]
        given, trees = pytree.tree_flatten([self.values[flat[i]] for i in positions])
        shapes: list[pytree.TreeSpec] = []

        def call(*examples: Any) -> Any:
            arguments = list(flat)
            for i, value in zip(positions, pytree.tree_unflatten(examples, trees), strict=True):
                arguments[i] = value
            args, kwargs = pytree.tree_unflatten(arguments, spec)
            found = form(*args, **kwargs)
            if found is NotImplemented:
                raise _Left
            if isinstance(found, (tuple, list)):
                pairs = zip(found, node.meta["val"], strict=True)
                found = tuple(_typed(*pair) for pair in pairs)  # of no named type
            else:
                found = _typed(found, node.meta["val"])
            leaves, shape = pytree.tree_flatten(found)
            shapes[:] = [shape]
            return tuple(leaves)

        examples = [value.meta["val"] for value in given]
        with self._mode, enable_python_dispatcher():
            body = make_fx(call, decomposition_table=self._table)(*examples)
            if any(mutates(part) for part in body.graph.nodes):  # a copy of its own, as a rule
                body = make_fx(functionalize(body), decomposition_table=self._table)(*examples)
        placeholders = body.graph.find_nodes(op="placeholder")
        inner: dict[fx.Node, Any] = dict(zip(placeholders, given, strict=True))
        # Which size torch asks for first depends on its caches.
        for x in placeholders:
            for size in sorted((u for u in x.users if u.target is _SIZE), key=lambda u: u.args[1]):
                inner[size] = self._size(inner[x], size.args[1])
        for part in body.graph.nodes:
            if part in inner:
                continue
            if part.op == "output":
                leaves = fx.node.map_arg(part.args[0], inner.__getitem__)
                return pytree.tree_unflatten(leaves, shapes[0])
            if part.op == "get_attr":
                raise Whole
            if part.target is aten.sym_numel.default:
                inner[part] = self._count(inner[part.args[0]])
            else:
                inner[part] = self.graph.node_copy(part, inner.__getitem__)
                within(inner[part], node)
        raise AssertionError("a graph has an output")

    def _rounded_down(self, node: fx.Node) -> fx.Node:
        """A quotient of sizes that may be negative, which ONNX would round towards zero."""

        def call(target: Any, *args: Any) -> fx.Node:
            made = self.graph.call_function(target, args)
            made.meta["val"] = target(*map(_value, args))
            return made

        over, by = fx.node.map_arg(node.args, self.values.__getitem__)
        exact = call(operator.sub, over, call(operator.mod, over, by))
        return call(operator.floordiv, exact, by)

    def _size(self, x: fx.Node, dim: int) -> fx.Node:
        if (x, dim) not in self._sizes:
            size = self._sizes[x, dim] = self.graph.call_function(_SIZE, (x, dim))
            size.meta["val"] = x.meta["val"].shape[dim]
        return self._sizes[x, dim]

    def _count(self, x: fx.Node) -> fx.Node | int:
        """How many elements `x` has, by its sizes."""
        shape = x.meta["val"].shape
        value: Any = math.prod(size for size in shape if isinstance(size, int))
        count: fx.Node | int = value
        for dim, size in enumerate(shape):
            if not isinstance(size, int):
                count = self.graph.call_function(operator.mul, (count, self._size(x, dim)))
                value = count.meta["val"] = value * size
        return count


def _value(argument: Any) -> Any:
    return argument.meta["val"] if isinstance(argument, fx.Node) else argument


def _typed(found: Any, wanted: Any) -> Any:
    """In the dtype of what it replaces: torch's decompositions may give gradients a wider one."""
    both = isinstance(found, Tensor) and isinstance(wanted, Tensor)
    return found.to(wanted.dtype) if both and found.dtype != wanted.dtype else found


class _Left(Exception):
    """An operator stays as it is."""


class Whole(Exception):
    """What an operator is replaced by has constants or regions of its own."""
