"""Operators of torch's with graphs inside: `cond`, `scan`, `map`, `while_loop`."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch._ops import HigherOrderOperator, OpOverload

from fuseport.exporter.errors import ExportFailed

__all__ = [
    "COND",
    "SCAN",
    "WHILE",
    "added",
    "called",
    "graphs",
    "nodes",
    "refuse_writers",
    "regions",
    "scans",
    "view_of",
]

aten = torch.ops.aten

COND = torch.ops.higher_order.cond
"""The operator of a choice between two graphs."""

SCAN = torch.ops.higher_order.scan
"""The operator of a loop whose turns leave states and slices."""

WHILE = torch.ops.higher_order.while_loop
"""The operator of a loop until a value is reached."""


def regions(graph: fx.Graph) -> list[fx.Node]:
    """The nodes of a graph that call one."""
    return [node for node in graph.nodes if isinstance(node.target, HigherOrderOperator)]


def graphs(module: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """A graph, and those inside."""
    return (part for part in module.modules() if isinstance(part, fx.GraphModule))


def nodes(module: fx.GraphModule) -> Iterator[Any]:
    """Those of a graph, and those of the ones inside."""
    return itertools.chain.from_iterable(part.graph.nodes for part in graphs(module))


def added(module: fx.GraphModule, inside: fx.GraphModule, stem: str) -> str:
    """Have a graph inside of another one, under a name of its own: the stem, and a number."""
    names = (f"{stem}_{i}" for i in itertools.count())
    name = next(each for each in names if not hasattr(module, each))
    module.add_submodule(name, inside)
    return name


def scans(module: fx.GraphModule) -> Iterator[tuple[fx.GraphModule, fx.Node]]:
    """Each `scan` in a graph and in those inside, beside the graph that it is in."""
    for part in graphs(module):
        for node in part.graph.find_nodes(op="call_function", target=SCAN):
            yield part, node


def view_of(node: fx.Node) -> Any:
    """The operator that gives a view where a node makes a copy of it, as torch has them in regions;
    None of other nodes."""
    name, _, overload = str(node.target).removeprefix("aten.").partition(".")
    view = name.removesuffix("_copy")
    if view == name or view not in _VIEWS or node.op != "call_function":
        return None
    if node.target is aten.view_copy.default:  # of what may have been a copy, and is a view then
        return aten.reshape.default
    return getattr(getattr(aten, view), overload)


_VIEWS = {
    "alias", "detach", "expand", "permute", "select", "slice", "split", "split_with_sizes",
    "squeeze", "t", "transpose", "unbind", "unsqueeze", "view", "_conj", "_neg_view",
    "view_as_complex", "view_as_real",
}  # fmt: skip


def refuse_writers(graph: fx.Graph, what: str) -> None:
    """Refuse operators that write into their arguments, which torch wraps in one that does not.

    Args:
        graph: of a forward program.
        what: there is not through them: a gradient, a form in ONNX.

    Raises:
        ExportFailed: there is one.
    """
    wrapped = (node.args[0] for node in regions(graph) if node.target in _WRAPPERS)
    if names := sorted({str(op.name()) for op in wrapped if isinstance(op, OpOverload)}):
        raise ExportFailed(
            f"there is no {what} {', '.join(names)}, which writes into its arguments: give the "
            "model an operator that returns what it computes, with a gradient of its own, and with "
            "--ops the op that it is of (README, Ops of your own)"
        )


_WRAPPERS = (auto_functionalized, auto_functionalized_v2)


@contextmanager
def called() -> Iterator[list[str]]:
    """The names of those that are called meanwhile."""
    found: list[str] = []
    call: Any = HigherOrderOperator.__call__

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(self.name())
        return call(self, *args, **kwargs)

    with mock.patch.object(HigherOrderOperator, "__call__", noted):
        yield found
