"""Modules as they were before they were first called.

Model code keeps tables that its first forward makes, in the dtype of then: rotary angles, grids. A
copy that is widened to float64 has to make its own.
"""

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from fuseport.exporter.models import _written
from fuseport.exporter.models._attributes import attributes, refill, same_items, tensors
from fuseport.exporter.models._written import undoing, without_modes

__all__ = [
    "as_before",
    "as_now",
    "forget",
    "fresh",
    "keeps",
    "remember",
    "repeatable",
    "undoing",
    "without_fast_path",
    "without_modes",
]


@dataclass(frozen=True)
class _Before:
    """What one module held.

    Attributes:
        attributes: its own, but parameters, buffers and modules.
        items: of those that are containers, what was in them.
        buffers: whether each was set.
    """

    attributes: Mapping[str, Any]
    items: Mapping[str, Any]
    buffers: Mapping[str, bool]


_before: "WeakKeyDictionary[nn.Module, _Before]" = WeakKeyDictionary()
# By module, what its calls compute of parameters and keep: the way to a module in it, and a name.
_computes: "WeakKeyDictionary[nn.Module, tuple[tuple[str, str], ...]]" = WeakKeyDictionary()
_calls = threading.RLock()


def remember(module: nn.Module) -> None:
    """Take note of a module as it is, before any call of it."""
    for part in module.modules():
        own = attributes(part)
        items = {name: copy.copy(v) for name, v in own.items() if isinstance(v, dict | list | set)}
        buffers = {name: value is not None for name, value in part._buffers.items()}
        _before[part] = _Before(own, items, buffers)
    _written.remember(module)


@contextmanager
def as_before(module: nn.Module) -> Iterator[None]:
    """Meanwhile a module is without what its calls have kept in it since it was remembered.

    Parameters, and buffers that were there, are as they are now. A module that was not remembered
    stays as it is.
    """
    with as_now(module):
        for part in module.modules():
            if before := _before.get(part):
                for name in dict.fromkeys((*attributes(part), *part._buffers, *before.attributes)):
                    _restore(part, before, name)
        yield


@contextmanager
def as_now(module: nn.Module) -> Iterator[None]:
    """What calls meanwhile keep in a module is not in it any more afterwards."""
    now = [
        (part, attributes(part), dict(part._buffers), dict(part._modules))
        for part in module.modules()
    ]
    try:
        yield
    finally:
        for part, own, buffers, parts in now:
            for name in attributes(part).keys() - own.keys():
                del vars(part)[name]
            vars(part).update(own)
            refill(part._buffers, buffers)
            refill(part._modules, parts)


def _restore(part: nn.Module, before: _Before, name: str) -> None:
    """Make one attribute of a module what it was, or nothing."""
    if name in part._buffers:
        if name not in before.buffers:
            del part._buffers[name]
        elif not before.buffers[name]:
            part._buffers[name] = None
    elif name not in before.attributes:
        del vars(part)[name]
    else:
        value, items = before.attributes[name], before.items.get(name)
        as_it_was = items is None or same_items(items, value)
        vars(part)[name] = value if as_it_was else copy.copy(items)


def fresh(module: nn.Module) -> nn.Module:
    """A copy of a module as it was when it was remembered, but with today's parameters."""
    with as_before(module):
        held = [t for part in module.modules() for _, t in tensors(attributes(part))]
        # A tensor that its constructor computed has no copy with its graph.
        copies: dict[int, Any] = {id(t): t.detach().clone() for t in held if _computed(t)}
        try:
            copied = copy.deepcopy(module, dict(copies))
        except Exception:  # of a class of the user's
            copied = copy.deepcopy(module, copies | _uncopied(module, copies))
    remember(copied)
    _written.carry(module, copied)
    return copied


def _uncopied(module: nn.Module, copies: Mapping[int, Any]) -> dict[int, Any]:
    """What a module's parts hold that has no copy, by its identity: copies share it.

    Locks, open files, configurations that raise what `copy` does not expect.
    """
    shared: dict[int, Any] = {}
    for part in module.modules():
        for value in attributes(part).values():
            try:
                copy.deepcopy(value, dict(copies))
            except Exception:
                shared[id(value)] = value
    return shared


def repeatable(module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, which calls the module, as often as one likes: each time has a gradient of its own.

    Model code may keep what it computes of its parameters, for a next call or to be looked at. That
    is taken away after each call: by its graph one can go back once, and without autograd it has
    none. Tables of no parameter stay. What it writes to its parameters and buffers is undone; see
    `undoing`. Without autograd it goes the way of which gradients are; see `without_fast_path`.
    """
    call = undoing(module, call)

    def again(*inputs: Any) -> Any:
        one_at_a_time = _calls if _computes.get(module) else nullcontext()  # of several threads
        with one_at_a_time, without_fast_path():
            result = call(*inputs)
            if module not in _computes:
                _computes[module] = _learned(module, lambda: call(*inputs))
            forget(module)
        return result

    return again


@contextmanager
def without_fast_path() -> Iterator[None]:
    """Attention by torch's layers as they are trained.

    Without autograd, in eval mode, `nn.TransformerEncoder` and `nn.MultiheadAttention` go another
    way, by nested tensors: what is padded comes out as zeros, of which gradients are not, NaN where
    all is hidden, and an error where all of a batch is.
    """
    if not torch.backends.mha.get_fastpath_enabled():
        yield
        return
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def forget(module: nn.Module) -> None:
    """Take away what calls have kept that they computed of parameters, as far as that is known."""
    for path, name in _computes.get(module, ()):
        part = module.get_submodule(path)
        if name in vars(part) or name in part._buffers:
            _restore(part, _before[part], name)


def _learned(module: nn.Module, call: Callable[[], Any]) -> tuple[tuple[str, str], ...]:
    if not keeps(module):
        return ()
    parts = {path: (part, _before.get(part)) for path, part in module.named_modules()}
    with as_before(module), torch.enable_grad():
        call()
        return tuple(
            (path, name)
            for path, (part, before) in parts.items()
            if before is not None
            for name, value in (*attributes(part).items(), *part._buffers.items())
            if _computed(value) and before.attributes.get(name) is not value
        )


def keeps(module: nn.Module) -> bool:
    """Whether calls have left something in a module since it was remembered."""
    parts = ((part, _before.get(part)) for part in module.modules())
    return not all(before is None or _as_it_was(part, before) for part, before in parts)


def _as_it_was(part: nn.Module, before: _Before) -> bool:
    own = attributes(part)
    return (
        own.keys() == before.attributes.keys()
        and all(own[name] is value for name, value in before.attributes.items())
        and all(same_items(items, own[name]) for name, items in before.items.items())
        and {name: b is not None for name, b in part._buffers.items()} == before.buffers
    )


def _computed(value: Any) -> bool:
    """Whether it is of what autograd knows the origin of, or holds that."""
    return any(tensor.grad_fn is not None for _, tensor in tensors(value))
