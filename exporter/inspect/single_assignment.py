"""Faults in how the nodes of an ONNX graph hang together, which no runtime may meet.

onnx's own checker refuses more than is wrong, what tools leave out and every runtime does without,
and does not look into bodies of functions.
"""

from collections.abc import Iterable, Iterator, Sequence
from graphlib import CycleError, TopologicalSorter

import onnx

from fuseport.exporter.checkpoint.content import show
from fuseport.exporter.inspect.onnx import inner_graphs

__all__ = ["first_fault"]


def first_fault(
    functions: Iterable[onnx.FunctionProto], graph: onnx.GraphProto | None = None
) -> str | None:
    """What is wrong first in functions and a graph: a value made twice, nowhere, or from itself.

    Names of a graph inside a node must differ from those around it (onnx/docs/IR.md, "Names within
    a graph").
    """
    for given, nodes in _scopes(functions, graph):
        if fault := _fault(given, nodes):
            return fault
    return None


def _scopes(
    functions: Iterable[onnx.FunctionProto], graph: onnx.GraphProto | None
) -> Iterator[tuple[list[set[str]], Sequence[onnx.NodeProto]]]:
    """The names that are given to a graph or body, by the graphs around it, and its nodes."""
    waiting = [([set(f.input)], list(f.node)) for f in functions]
    if graph is not None:
        waiting.append(([_own(graph)], list(graph.node)))
    while waiting:
        given, nodes = waiting.pop()
        yield given, nodes
        # The sets are shared: a thousand graphs in one node see the same thousand names.
        outer = [*given, {name for node in nodes for name in node.output}]
        waiting += [([*outer, _own(inner)], list(inner.node)) for inner in inner_graphs(nodes)]


def _own(graph: onnx.GraphProto) -> set[str]:
    sparse = (s.values.name for s in graph.sparse_initializer)
    return {*(v.name for v in graph.input), *(t.name for t in graph.initializer), *sparse}


def _fault(given: Sequence[set[str]], nodes: Sequence[onnx.NodeProto]) -> str | None:
    maker: dict[str, int] = {}

    def is_before(name: str) -> bool:
        return any(name in names for names in given)

    for number, node in enumerate(nodes):
        for name in filter(None, node.output):
            if name in maker or is_before(name):
                return f"the value {show(name, 60)} is made twice"
            maker[name] = number
    order = TopologicalSorter[int]()
    for number, node in enumerate(nodes):
        for name in filter(None, node.input):
            if name not in maker and not is_before(name):
                return f"the value {show(name, 60)} is made nowhere"
        order.add(number, *{maker[name] for name in node.input if name in maker})
    try:
        order.prepare()
    except CycleError as error:
        names = ", ".join(show(nodes[n].name or nodes[n].op_type, 40) for n in error.args[1][:4])
        return f"a cycle of nodes: {names}"
    return None
