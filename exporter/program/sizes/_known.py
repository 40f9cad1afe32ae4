"""Numbers that code reads of buffers, in a capture: `self.steps.item()`.

To torch they hang on values, and what is decided by them, or as large as they say, cannot be
captured. But a program has its buffers as they are.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from fuseport.exporter.program._drawing import draws
from fuseport.exporter.program._needed import needed
from fuseport.exporter.program.loops._turns import TURN

__all__ = ["buffers_of", "is_function", "knowing", "node_of", "number", "value"]


class _State:
    """Of the capture that is going on: by placeholder, what it stands for."""

    now: Mapping[fx.Node, Tensor] | None = None


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """The buffers of a module, by name, as they are before it is captured."""
    return dict(module.named_buffers(remove_duplicate=False))


@contextmanager
def knowing(module: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """In a capture: what its buffers are is known meanwhile.

    Args:
        module: that is captured.
        values: from `buffers_of`.
    """
    known = {
        node: values[name]
        for name, buffer in module.named_buffers(remove_duplicate=False)
        if name in values and (node := node_of(buffer)) is not None
    }
    with mock.patch.object(_State, "now", known):
        yield


def number(func: Any, args: Sequence[Any]) -> Any:
    """What a function reads of a tensor, if that is known; None if it is not, or reads nothing."""
    read = _READING.get(func)
    if read is None or not args or (known := value(args[0])) is None or known.numel() != 1:
        return None
    with _plainly():
        return read(known)


_READING: dict[Any, Callable[[Tensor], Any]] = {
    Tensor.item: Tensor.item,
    Tensor.__int__: int,
    Tensor.__float__: float,
    Tensor.__bool__: bool,
    Tensor.__index__: operator.index,
    Tensor.is_nonzero: bool,
    torch.is_nonzero: bool,
}


def value(x: Any) -> Tensor | None:
    """What a tensor of a capture comes to, where it is computed of buffers and numbers alone.

    Of what is written to, nothing is known, nor of what a loop has made of which there are a few
    turns.
    """
    if _State.now is None or torch.compiler.is_dynamo_compiling():
        return None
    end = node_of(x)
    if end is None or not _is_known(end, of := needed([end])) or _is_written_to(of):
        return None
    if any(user.target is TURN for node in of for user in node.users):
        return None
    found: dict[fx.Node, Any] = dict(_State.now)
    with _plainly():
        for node in end.graph.nodes:
            if node in of and node not in found:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), found.__getitem__)
                found[node] = node.target(*args, **kwargs)
    known = found[end]
    return known if isinstance(known, Tensor) else None


@contextmanager
def _plainly() -> Iterator[None]:
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


def node_of(x: Any) -> fx.Node | None:
    """The node of the capture that is going on that gives a tensor."""
    mode = get_proxy_mode()
    if mode is None or not isinstance(x, Tensor):
        return None
    slot: Any = get_proxy_slot(x, mode.tracer, None)
    return None if slot is None else slot.proxy.node


def _is_known(end: fx.Node, of: set[fx.Node]) -> bool:
    assert _State.now is not None
    return all(node in _State.now or is_function(node) for node in of)


def is_function(node: fx.Node) -> bool:
    """Whether it computes the same of the same, and of nothing else."""
    if node.target is operator.getitem:
        return True
    return (
        isinstance(node.target, OpOverload)
        and not node.target._schema.is_mutable
        and not draws(node)
    )


def _is_written_to(of: set[fx.Node]) -> bool:
    """Whether something writes to what may be memory of one of some nodes."""
    graph = next(iter(of)).graph
    for node in graph.nodes:
        if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
            given = zip(node.target._schema.arguments, node.args, strict=False)
            written = [
                x for argument, x in given if (alias := argument.alias_info) and alias.is_write
            ]
            written += [x for name, x in node.kwargs.items() if name.startswith("out")]
            if not of.isdisjoint(needed(filter(_is_node, pytree.tree_leaves(written)))):
                return True
    return False


def _is_node(x: Any) -> bool:
    return isinstance(x, fx.Node)
