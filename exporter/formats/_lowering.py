"""Operators of a program, rewritten in terms of others, in place in its graph.

`ExportedProgram.run_decompositions` traces the whole program again; this traces what an operator is
replaced by, and no more.
"""

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch._prims
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch.export import ExportedProgram
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from fuseport.exporter.formats._scalars import of_higher_rank
from fuseport.exporter.program import mutates, rebuilt
from fuseport.exporter.program._layouts import any_layouts
from fuseport.exporter.program.bounds import not_negative
from fuseport.exporter.program.provenance import within
from fuseport.exporter.program.tracing import resized_to_one

__all__ = ["VALUE_OF", "Lowering", "Rewriting", "Table", "rewritten"]

aten = torch.ops.aten
_SIZE = aten.sym_size.int
_HALF = (torch.float16, torch.bfloat16)
_RESHAPES = (aten.view.default, aten.reshape.default)
_VIEWS_OF_PRIMS = {
    getattr(torch.ops.prims, name).default: getattr(torch._prims, name).impl_aten
    for name in ("broadcast_in_dim", "collapse_view", "split_dim", "squeeze", "transpose")
}
"""What torch's own forms of operators have in them, and it refuses to trace beside regions."""
_SPLIT = {aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int}
"""What becomes one operator in regions, where one turn after another takes parts: see `_splits`."""
_LAYOUTS = {torch.ops.prims.copy_strided.default: lambda x, stride: x.clone()}
"""What they have in them of strides, of which ONNX knows nothing."""

VALUE_OF = "value_of"
"""The key in a node's `meta` under which stands which node of the program's own it is."""

Table = Mapping[Any, Callable[..., Any]]
"""Operators, each with a function that computes the same from the same arguments. One that returns
NotImplemented leaves the operator where it is."""


class Lowering(ExportedProgram):
    """A program that decomposes in place: torch.onnx asks for that, of operators it has no form of.

    The original stays as it is.

    Attributes:
        lowered: what it became, once it was asked for.
    """

    lowered: ExportedProgram | None = None

    def __init__(self, exported: ExportedProgram, table: Table) -> None:
        """Take what is in `table`, too, and rather than what torch has for the same operator."""
        self.__dict__.update(exported.__dict__)
        self._own = {**_LAYOUTS, **table}

    def run_decompositions(
        self, decomp_table: Table | None = None, decompose_custom_triton_ops: bool = False
    ) -> ExportedProgram:
        """The program in terms of other operators, in one pass over its graph."""
        with resized_to_one():
            self.lowered = self._decomposed(dict(decomp_table or {}))
        return self.lowered

    def _decomposed(self, others: dict[Any, Callable[..., Any]]) -> ExportedProgram:
        if not self.graph.find_nodes(op="get_attr"):
            try:
                return rewritten(self, Rewriting(self, {**others, **self._own}))
            except _Whole:
                pass
        # Tracing the whole follows regions of the graph, and adds constants to a program.
        own = Rewriting(self, {**_VIEWS_OF_PRIMS, **self._own})
        inside = {**others, **{op: form for op, form in self._own.items() if op not in _SPLIT}}
        with any_layouts():
            whole: ExportedProgram = rewritten(self, own).run_decompositions(inside)
        return whole


def _value(argument: Any) -> Any:
    return argument.meta["val"] if isinstance(argument, fx.Node) else argument


def _typed(found: Any, wanted: Any) -> Any:
    """In the dtype of what it replaces: torch's decompositions may give gradients a wider one."""
    both = isinstance(found, Tensor) and isinstance(wanted, Tensor)
    return found.to(wanted.dtype) if both and found.dtype != wanted.dtype else found


class _Left(Exception):
    """An operator stays as it is."""


class _Whole(Exception):
    """What an operator is replaced by has constants or regions of its own."""


def rewritten(exported: ExportedProgram, rewriting: "Rewriting") -> ExportedProgram:
    """The program after all its nodes were rewritten."""
    graph, values = rewriting.graph, rewriting.values
    for node in exported.graph.nodes:
        values[node] = rewriting.of(node)
    for old, new in values.items():
        if isinstance(new, fx.Node):
            new.meta.setdefault(VALUE_OF, old.name)
    for node in [n for n in graph.nodes if n.target in _RESHAPES]:
        # Symbolic nodes are contiguous where ops are laid out like their inputs: a view may not fit
        # any more. ONNX Reshape does, but torch.onnx takes sizes of 0 for others in a reshape.
        with graph.inserting_before(node):
            (x,) = (n for n in node.all_input_nodes if isinstance(n.meta["val"], Tensor))
            contiguous = graph.call_function(
                aten.clone.default, (x,), {"memory_format": torch.contiguous_format}
            )
            contiguous.meta["val"] = x.meta["val"]
            node.replace_input_with(x, contiguous)
            node.target = aten.view.default
    _part_outputs(graph)
    # A new graph renames placeholders that are called like a builtin of Python's: `input` is.
    placeholders = graph.find_nodes(op="placeholder")
    inputs = [
        replace(spec, arg=replace(spec.arg, name=node.name))
        for spec, node in zip(exported.graph_signature.input_specs, placeholders, strict=True)
    ]
    return rebuilt(exported, graph, inputs)


def _part_outputs(graph: fx.Graph) -> None:
    """Outputs of a half type are copies: torch.onnx lets a reduction give float32, and casts that.

    What uses the reduction gets the cast's result, but what the program gives remains the first.
    """
    output = graph.output_node()
    for node in dict.fromkeys(output.all_input_nodes):
        value = node.meta["val"]
        if node.op != "placeholder" and isinstance(value, Tensor) and value.dtype in _HALF:
            with graph.inserting_before(output):
                copy = graph.call_function(aten.clone.default, (node,))
            copy.meta["val"] = value
            output.replace_input_with(node, copy)


class Rewriting:
    """A graph that is made of another one, node by node. ONNX has no form of `sym_numel`.

    Attributes:
        graph: the new one.
        values: nodes of the old graph → nodes of the new, or trees of them.
    """

    def __init__(self, exported: ExportedProgram, table: Table) -> None:
        """Begin with a graph that is empty."""
        self.graph = fx.Graph()
        self.values: dict[fx.Node, Any] = {}
        self._table = table
        self._sizes: dict[tuple[fx.Node, int], fx.Node] = {}
        given = next(iter(exported.graph.find_nodes(op="placeholder")))
        self._mode = given.meta["val"].fake_mode

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
        return of_higher_rank(node) or self._table.get(node.target)

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
                raise _Whole
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
