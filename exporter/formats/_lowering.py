"""Operators of a program, rewritten in terms of others, in place in its graph.

`ExportedProgram.run_decompositions` would trace the whole program again; this traces what an
operator is replaced by, and no more.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses import FakeTensor
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from fuseport.exporter.program import rebuilt

__all__ = ["Table", "lowered"]

Table = Mapping[Any, Callable[..., Any]]
"""Operators, each with what computes the same from the same arguments: a function, which is traced,
or another operator, which takes its place as it is."""


def lowered(exported: ExportedProgram, table: Table) -> ExportedProgram:
    """A program that computes the same, with no operator of the table left in it."""
    graph = fx.Graph()
    values: dict[Any, Any] = {}  # nodes of the old graph → nodes of the new, or tuples of them
    for node in exported.graph.nodes:
        if node.target is operator.getitem and isinstance(values[node.args[0]], tuple):
            values[node] = values[node.args[0]][node.args[1]]
        elif node.target in table and not isinstance(table[node.target], OpOverload):
            values[node] = _inlined(graph, node, table, values)
        else:
            values[node] = graph.node_copy(node, values.__getitem__)
    for node in graph.nodes:
        node.target = table.get(node.target, node.target)
    return rebuilt(exported, graph, exported.graph_signature.input_specs)


def _inlined(graph: fx.Graph, node: fx.Node, table: Table, values: Mapping[fx.Node, Any]) -> Any:
    """What `node` is replaced by, appended to `graph`; a tuple where it returns several tensors."""
    flat, spec = pytree.tree_flatten((node.args, node.kwargs))
    positions = [i for i, value in enumerate(flat) if isinstance(value, fx.Node)]
    examples = [flat[i].meta["val"] for i in positions]

    def call(*given: Any) -> Any:
        arguments = list(flat)
        for i, value in zip(positions, given, strict=True):
            arguments[i] = value
        args, kwargs = pytree.tree_unflatten(arguments, spec)
        return table[node.target](*args, **kwargs)

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
