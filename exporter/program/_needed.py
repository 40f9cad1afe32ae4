"""What some nodes of a graph are computed of."""

from collections.abc import Callable, Iterable

from torch import fx

__all__ = ["needed"]


def _taken(node: fx.Node) -> Iterable[fx.Node]:
    return node.all_input_nodes


def needed(
    nodes: Iterable[fx.Node], taken: Callable[[fx.Node], Iterable[fx.Node]] = _taken
) -> set[fx.Node]:
    """These nodes, and all that they need.

    Args:
        nodes: to begin with.
        taken: what one node needs itself; by default, all that it is called with.
    """
    found: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += taken(node)
    return found
