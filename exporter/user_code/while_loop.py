"""`torch.while_loop` as a model calls it: outside of a capture, a loop of Python's.

There torch compiles it, and has a gradient that goes through one turn of the body where there was
none. In a capture, it wants states that keep their strides and are never what they were before.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = ["allow"]

_THEIRS: Any = torch.while_loop


def allow() -> None:
    """Have code that is imported from now on take this function for torch's of the same name."""
    torch.while_loop = _while_loop
    # A module has its name, too, beside the package that shows the function.
    package: Any = importlib.import_module("torch._higher_order_ops")
    module: Any = importlib.import_module("torch._higher_order_ops.while_loop")
    package.while_loop = module.while_loop = _while_loop


@functools.wraps(_THEIRS)
def _while_loop(cond_fn: Callable[..., Any], body_fn: Callable[..., Any], carried: Any) -> Any:
    if torch.compiler.is_compiling():
        return _THEIRS(cond_fn, lambda *states: _apart(body_fn(*states)), _apart(carried))
    _, spec = pytree.tree_flatten(carried)
    while cond_fn(*carried):
        carried = body_fn(*carried)
        if pytree.tree_flatten(carried)[1] != spec:
            raise TypeError("while_loop: body_fn gives something else than it is given")
    return pytree.tree_map_only(torch.Tensor, torch.clone, carried)


def _apart(states: Any) -> Any:
    """They, contiguous, and none of them another tensor's memory."""

    def copied(state: torch.Tensor) -> torch.Tensor:
        return state.clone(memory_format=torch.contiguous_format)

    return pytree.tree_map_only(torch.Tensor, copied, states)
