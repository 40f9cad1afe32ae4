"""What a graph computes between some nodes and others, to be run for autograd to see it."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch import predispatch
from torch._ops import OpOverload

from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.program import mutates
from fuseport.exporter.program._drawing import draws
from fuseport.exporter.program._needed import needed
from fuseport.exporter.program.portable import DIFFERENTIABLE, PORTABLE
from fuseport.exporter.program.sizes._known import node_of

__all__ = ["Between", "attribute", "refused", "written"]

_MANY = (predispatch._vmap_increment_nesting, predispatch._vmap_decrement_nesting)
_SET_GRAD = torch._C._set_grad_enabled


class Between:
    """What a graph that is being made computes from some nodes on.

    Args:
        tracer: that makes it.
        roots: where it ends.
        leaves: where it begins.

    Attributes:
        given: other nodes that it takes.
        known: of the trace that runs it, nodes that give what those of the graph do.
    """

    def __init__(self, tracer: Any, roots: Sequence[fx.Node], leaves: Sequence[fx.Node]) -> None:
        self._root, self._roots = tracer.root, roots
        self.known: dict[fx.Node, fx.Node] = {}
        nodes = list(tracer.graph.nodes)
        hanging = _hanging(nodes, leaves)

        many = [node for node in nodes if node.target in _MANY]
        inner = hanging.union(many, (node for node in nodes if _is_no_tensor(node)))

        def taken(node: fx.Node) -> Sequence[fx.Node]:
            return node.all_input_nodes if node in inner else ()

        within = written(nodes, needed([*roots, *many], taken), taken) - {*leaves}
        self._open, singles = _of_many(nodes)
        if any(node in singles or draws(node) for node in within & hanging):
            raise refused("through random numbers, or out of a torch.vmap")
        self.given = [n for n in nodes if n in within and n not in inner]
        self._nodes = []
        enabled = True
        for node in nodes:
            if node.target is _SET_GRAD:
                enabled = bool(node.args[0])
            elif node in within and node in inner:
                self._nodes.append((node, enabled))

    def run(self, values: Mapping[fx.Node, Any]) -> list[Tensor]:
        """What the roots are, of values of the leaves and of what is given."""
        found = dict(values)
        for node, enabled in self._nodes:
            if node.op == "get_attr":
                found[node] = attribute(self._root, node)
                continue
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), found.__getitem__)
            with torch.set_grad_enabled(enabled):
                result = found[node] = _called(node.target, args, kwargs)
            if (known := _node_that_gave(result)) is not None:
                self.known.setdefault(known, node)
        for _ in range(self._open):
            predispatch._vmap_decrement_nesting()
        return [found[node] for node in self._roots]


def _node_that_gave(result: Any) -> fx.Node | None:
    if not isinstance(result, tuple | list):
        return node_of(result)
    parts = [node for each in result if (node := node_of(each)) is not None]
    if not parts or parts[0].target is not operator.getitem:
        return None
    (whole,) = parts[0].all_input_nodes
    return whole


def _hanging(nodes: Sequence[fx.Node], leaves: Sequence[fx.Node]) -> set[fx.Node]:
    """What hangs on some nodes, or is memory that something writes to which does; with them."""
    found, written = set(leaves), set()
    while True:
        before = len(found)
        for node in nodes:
            if found & {*node.all_input_nodes} or _memory_of(node) in written:
                found.add(node)
                if mutates(node):
                    written.add(_memory_of(node))
        if len(found) == before:
            return found


def written(
    nodes: Sequence[fx.Node], within: set[fx.Node], taken: Callable[[fx.Node], Sequence[fx.Node]]
) -> set[fx.Node]:
    """Some nodes, with what writes to their memory, by views, too, and what that needs."""
    writers = [node for node in nodes if mutates(node)]
    while True:
        memory = {_memory_of(node) for node in within if taken(node)}
        more = [n for n in writers if n not in within and _memory_of(n) in memory]
        if not more:
            return within
        within = within | needed(more, taken)


def _memory_of(node: fx.Node) -> fx.Node:
    """What made the memory that a node gives, or writes to: no view, and no operator in place."""
    target = node.target
    while isinstance(target, OpOverload) and (of := target._schema.arguments):
        if of[0].alias_info is None or not isinstance(node.args[0], fx.Node):
            break
        node = node.args[0]
        target = node.target
    return node


def _of_many(nodes: Sequence[fx.Node]) -> tuple[int, set[fx.Node]]:
    """How many of `torch.vmap` go on behind some nodes, and what of these is one of many there."""
    begun: list[set[fx.Node]] = []
    for node in nodes:
        if node.target is predispatch._vmap_increment_nesting:
            begun.append(set())
        elif node.target is predispatch._vmap_decrement_nesting:
            begun.pop()
        elif node.target is predispatch._add_batch_dim:
            begun[-1].add(node)
    return len(begun), set().union(*begun)


def _is_no_tensor(node: fx.Node) -> bool:
    """Whether it is a size, another number, or a graph inside."""
    if node.op == "get_attr":
        return not isinstance(node.meta.get("val"), Tensor)
    return isinstance(node.meta.get("val"), int | float | torch.SymInt | torch.SymFloat)


def attribute(root: Any, node: fx.Node) -> Any:
    return operator.attrgetter(str(node.target))(root)


def _called(target: Any, args: Any, kwargs: Any) -> Any:
    """What an operator gives, by a form of it that has a portable derivative."""
    form: Callable[..., Any] | None = DIFFERENTIABLE.get(target)
    result = NotImplemented if form is None else form(*args, **kwargs)
    if result is NotImplemented:
        result = PORTABLE.get(target, target)(*args, **kwargs)
    return result


def refused(what: str) -> ExportFailed:
    """An error of a derivative that there is no program of."""
    return ExportFailed(f"the program cannot be captured: torch.autograd.grad is called {what}")
