"""Numbers that code reads of buffers, in a capture: `self.steps.item()`.

To torch they hang on values, and what is decided by them, or as large as they say, cannot be
captured. But a program has its buffers as they are.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._C import _functorch as functorch
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils._python_dispatch import _disable_current_modes

from fuseport.exporter.program._drawing import draws
from fuseport.exporter.program._needed import needed
from fuseport.exporter.program._writing import written_by
from fuseport.exporter.program.matching import ASSERT
from fuseport.exporter.program.refusing import HOLDS
from fuseport.exporter.program.sizes._at_sizes import in_turns, same_at_all

__all__ = ["buffers_of", "is_function", "knowing", "node_of", "number", "value"]

aten = torch.ops.aten


class _State:
    """Of the capture that is going on.

    Attributes:
        now: by placeholder, what it stands for.
        alike: by node and how often it was written to, what is the same at several sizes.
    """

    now: Mapping[fx.Node, Tensor] | None = None
    alike: ClassVar[dict[tuple[fx.Node, int], Tensor | None]] = {}


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
    with mock.patch.multiple(_State, now=known, alike={}):
        yield


def number(func: Any, args: Sequence[Any]) -> Any:
    """What a function reads of a tensor, if that is known; None if it is not, or reads nothing."""
    read = _READING.get(func)
    if read is None or not args:
        return None
    known = value(args[0])
    if known is None:
        known = _of_sizes_alone(args[0], decided=func in _DECIDING)
    if known is None or known.numel() != 1:
        return None
    with _plainly():
        return read(known)


def _of_sizes_alone(x: Any, *, decided: bool) -> Tensor | None:
    """A number that hangs on no values of inputs, and is the same at several of their sizes.

    The program asserts that it is so at others. Of what is decided by, both ways can be in a
    program as a rule, and at some size it may come out otherwise (`if places.max() > 4096:`): but
    where it is whether two are equal, as in an `assert` of shapes.
    """
    if _State.now is None or torch.compiler.is_dynamo_compiling():
        return None
    if (end := node_of(x)) is None or x.is_floating_point() or x.is_inference():
        return None  # of the last torch counts no writes
    if functorch.is_batchedtensor(x):
        return None  # as many numbers as `vmap` has turns
    if any(type(size) is not int or size != 1 for size in x.shape):
        return None
    if decided and end.target not in _EQUAL:
        return None
    if (key := (end, x._version)) in _State.alike:
        return _State.alike[key]
    root: Any = get_proxy_mode().tracer.root  # type: ignore[union-attr]  # `node_of` found it
    constants = {
        node: made
        for node in end.graph.find_nodes(op="get_attr")
        if type(made := getattr(root, str(node.target), None)) is Tensor
    }
    with _plainly():
        known = _State.alike[key] = same_at_all(end, {**_State.now, **constants})
        if known is not None:
            _assert_equal(end, x, known.item())
    return known


def _assert_equal(end: fx.Node, x: Tensor, number: float) -> None:
    """Right behind what gives it: where it is read may be in a turn of a loop."""
    graph = end.graph
    held = x == number
    said = f"{HOLDS} what hangs on sizes alone is {number}"
    with graph.inserting_after(end):
        equal = graph.call_function(aten.eq.Scalar, (end, number))
    with graph.inserting_after(equal):
        right = graph.call_function(aten.all.default, (equal,))
    with graph.inserting_after(right):
        check = graph.call_function(ASSERT, (right, said))
    for node, value in ((equal, held), (right, held.all()), (check, None)):
        node.meta = {**end.meta, "val": value}  # torch wants to know whose code each node is


_READING: dict[Any, Callable[[Tensor], Any]] = {
    Tensor.item: Tensor.item,
    Tensor.__int__: int,
    Tensor.__float__: float,
    Tensor.__bool__: bool,
    Tensor.__index__: operator.index,
    Tensor.is_nonzero: bool,
    torch.is_nonzero: bool,
}

_DECIDING = (Tensor.__bool__, Tensor.is_nonzero, torch.is_nonzero)
_EQUAL = (aten.eq.Scalar, aten.eq.Tensor, aten.ne.Scalar, aten.ne.Tensor)


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
    if in_turns(of):
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
    nodes = next(iter(of)).graph.nodes
    return not all(of.isdisjoint(needed(written_by(node))) for node in nodes)
