"""What operators write to."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

__all__ = ["written", "written_by"]


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Those of its arguments that an operator writes to, and what is in them if they are lists."""
    if not isinstance(func, OpOverload) or not func._schema.is_mutable:
        return []
    found: list[Any] = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[number] if number < len(args) else kwargs.get(argument.name))
    return pytree.tree_leaves(found)


def written_by(node: fx.Node) -> list[fx.Node]:
    """The tensors that a node writes to."""
    found = written(node.target, node.args, node.kwargs)
    return [x for x in found if isinstance(x, fx.Node)]
