"""Operators of torch's with graphs inside: `cond`, `scan`, `map`, `while_loop`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import fx
from torch._ops import HigherOrderOperator

__all__ = ["called", "regions"]


def regions(graph: fx.Graph) -> list[fx.Node]:
    """The nodes of a graph that call one."""
    return [node for node in graph.nodes if isinstance(node.target, HigherOrderOperator)]


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
