"""Copies of a module as it was before it was first called.

Model code keeps tables that its first forward makes, in the dtype of then: rotary angles, grids. A
copy that is widened to float64 has to make its own.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

__all__ = ["fresh", "remember"]


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
_TORCHS = frozenset(vars(nn.Module()))  # attributes that every module has


def remember(module: nn.Module) -> None:
    """Take note of a module as it is, before any call of it."""
    for part in module.modules():
        own = {name: value for name, value in vars(part).items() if name not in _TORCHS}
        items = {name: copy.copy(v) for name, v in own.items() if isinstance(v, dict | list | set)}
        buffers = {name: value is not None for name, value in part._buffers.items()}
        _before[part] = _Before(own, items, buffers)


def fresh(module: nn.Module) -> nn.Module:
    """A copy of a module, without what its calls have kept in it since it was remembered.

    Parameters, and buffers that were there, are as they are now. A module that was not remembered
    is copied as it is.
    """
    copied = copy.deepcopy(module)
    for part, other in zip(module.modules(), copied.modules(), strict=True):
        before = _before.get(part)
        if before is None:
            continue
        for name in part._buffers:
            if name not in before.buffers:
                delattr(other, name)
            elif not before.buffers[name]:
                setattr(other, name, None)
        kept = {name: value for name, value in vars(part).items() if name not in _TORCHS}
        for name in kept.keys() - before.attributes.keys():
            del vars(other)[name]
        for name, value in before.attributes.items():
            items = before.items.get(name)
            if name not in kept or kept[name] is not value:
                vars(other)[name] = copy.deepcopy(value)
            elif items is not None and not _same(items, value):
                vars(other)[name] = copy.deepcopy(items)
    return copied


def _same(items: Any, others: Any) -> bool:
    """Whether two containers hold the very same things."""
    if isinstance(items, dict):
        return items.keys() == others.keys() and all(others[k] is v for k, v in items.items())
    return len(items) == len(others) and all(a is b for a, b in zip(items, others, strict=True))
