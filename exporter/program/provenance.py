"""Which layer of the model each node of a gradient program comes from, backward nodes included."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, fx
from torch.fx import traceback
from torch.utils import _pytree as pytree

__all__ = ["Provenance", "layer", "within"]

_STACK = "nn_module_stack"
_OTHERS = ("seq_nr", "torch_fn", "original_aten")


def layer(node: fx.Node) -> str:
    """The path of the innermost module that a node is in; empty where none is known."""
    paths = [path for path, _ in node.meta.get(_STACK, {}).values()]
    found = paths[-1] if paths else ""
    return "" if found.startswith("_empty_nn_module_stack") else str(found)


def within(node: fx.Node, of: fx.Node) -> None:
    """Say that a node is in the layers of another, which it computes a part of."""
    if _STACK in of.meta:
        node.meta[_STACK] = of.meta[_STACK]


class Provenance:
    """Marks what is traced with the layers of the captured nodes that it comes from.

    An operator's derivative belongs to the layer of the operator: autograd tells when it comes to
    it. `tracing` goes around the trace, `running` around each captured node that is run in it.
    """

    def __init__(self) -> None:
        self._known: set[Any] = set()

    @staticmethod
    def tidy(graph: fx.Graph) -> None:
        """Drop what `tracing` has torch note beside the layers: numbers that count up for ever."""
        for node in graph.nodes:
            for key in _OTHERS:
                node.meta.pop(key, None)

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Nodes that are traced get the marks."""
        with traceback.preserve_node_meta():
            try:
                yield
            finally:
                traceback.current_meta.pop(_STACK, None)

    def mark(self, node: fx.Node) -> None:
        """What is traced from here on comes from `node`."""
        _come_to(node.meta.get(_STACK))

    def gave(self, node: fx.Node, result: Any) -> None:
        """The derivative of what `node` gave comes from it too."""
        stack = node.meta.get(_STACK)
        for value in pytree.tree_leaves(result):
            if isinstance(value, Tensor) and value.grad_fn is not None:
                self._hook(value.grad_fn, stack)

    def _hook(self, function: Any, stack: Any) -> None:
        """Operators of several steps have several functions, back to those that are known."""
        waiting = [function]
        while waiting:
            function = waiting.pop()
            if function is None or function in self._known:
                continue
            self._known.add(function)
            function.register_prehook(lambda _: _come_to(stack))
            waiting += [following for following, _ in function.next_functions]


def _come_to(stack: Any) -> None:
    if stack is None:
        traceback.current_meta.pop(_STACK, None)
    else:
        traceback.current_meta[_STACK] = stack
