"""Operators of a program, rewritten in terms of others, in place in its graph.

`ExportedProgram.run_decompositions` would trace the whole program again; this traces what an
operator is replaced by, and no more.
"""

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses import FakeTensor
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from fuseport.exporter.program import rebuilt

__all__ = ["VALUE_OF", "Table", "lowered"]

VALUE_OF = "value_of"
"""The key in a node's `meta` under which stands which node of the program's own it is."""

Table = Mapping[Any, Callable[..., Any]]
"""Operators, each with what computes the same from the same arguments: a function, which is traced,
or another operator, which takes its place as it is. A function that returns NotImplemented leaves
the operator where it is."""


class _Left(Exception):
    """An operator stays as it is."""


def lowered(exported: ExportedProgram, table: Table) -> ExportedProgram:
    """A program that computes the same, with what the table has in place of its operators."""
    graph = fx.Graph()
    values: dict[Any, Any] = {}  # nodes of the old graph → nodes of the new, or tuples of them
    for node in exported.graph.nodes:
        if node.target is operator.getitem and isinstance(values[node.args[0]], tuple):
            values[node] = values[node.args[0]][node.args[1]]
        elif node.target in table and not isinstance(table[node.target], OpOverload):
            try:
                values[node] = _inlined(graph, node, table, values)
            except _Left:
                values[node] = graph.node_copy(node, values.__getitem__)
        else:
            values[node] = graph.node_copy(node, values.__getitem__)
    for old, new in values.items():
        if isinstance(new, fx.Node):
            new.meta.setdefault(VALUE_OF, old.name)
    for node in graph.nodes:
        if isinstance(entry := table.get(node.target), OpOverload):
            node.target = entry
    # A new graph renames placeholders that are called like a builtin of Python's: `input` is.
    placeholders = graph.find_nodes(op="placeholder")
    inputs = [
        replace(spec, arg=replace(spec.arg, name=node.name))
        for spec, node in zip(exported.graph_signature.input_specs, placeholders, strict=True)
    ]
    return rebuilt(exported, graph, inputs)


def _inlined(graph: fx.Graph, node: fx.Node, table: Table, values: Mapping[fx.Node, Any]) -> Any:
    """What `node` is replaced by, appended to `graph`; a tuple where it returns several tensors.

    Raises:
        _Left: it stays as it is.
    """
    flat, spec = pytree.tree_flatten((node.args, node.kwargs))
    positions = [i for i, value in enumerate(flat) if isinstance(value, fx.Node)]
    examples = [flat[i].meta["val"] for i in positions]

    def call(*given: Any) -> Any:
        arguments = list(flat)
        for i, value in zip(positions, given, strict=True):
            arguments[i] = value
        args, kwargs = pytree.tree_unflatten(arguments, spec)
        found = table[node.target](*args, **kwargs)
        if found is NotImplemented:
            raise _Left
        return found

    traced = {op: entry for op, entry in table.items() if not isinstance(entry, OpOverload)}
    mode = next(e.fake_mode for e in examples if isinstance(e, FakeTensor))
    with mode, enable_python_dispatcher():
        body = make_fx(call, decomposition_table=traced)(*examples)
    inner: dict[fx.Node, Any] = {}
    given = (values[flat[i]] for i in positions)
    for part in body.graph.nodes:
        if part.op == "placeholder":
            inner[part] = next(given)
        elif part.op == "output":
            return fx.node.map_arg(part.args[0], inner.__getitem__)
        else:
            inner[part] = graph.node_copy(part, inner.__getitem__)
    raise AssertionError("a graph has an output")
