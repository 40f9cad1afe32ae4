"""Views of parameters that a model's constructor made and keeps: made anew for each call.

A view such as `self.turned = self.layer.weight.T` goes with its parameter in training. A capture
would take it for a constant, and in a copy of the module, or one of another dtype, it would be of
the old parameter. So the module's forward has it of today's parameter instead.
"""

import copy
import functools
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import permutations
from types import MethodType
from typing import Any

from torch import Tensor, nn

from fuseport.exporter.models.fresh import attributes

__all__ = ["renew"]

_DIMENSIONS = 4  # of which all orders are tried
_calls = threading.RLock()


@dataclass(frozen=True)
class _View:
    """One of them.

    Attributes:
        part: the path of the module that keeps it.
        attribute: of that module.
        keys: the way to it through what the attribute holds, lists and dictionaries.
        parameter: its path.
        size, stride, offset: of the view in the parameter's memory, in elements.
    """

    part: str
    attribute: str
    keys: tuple[Any, ...]
    parameter: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, base: Tensor) -> Tensor:
        """The same view of a tensor that is contiguous, as the parameter is."""
        if self.offset == 0 and base.numel() == math.prod(self.size) and base.dim() <= _DIMENSIONS:
            for order in permutations(range(base.dim())):
                turned = base.permute(order)
                if (tuple(turned.shape), turned.stride()) == (self.size, self.stride):
                    return turned
            if self.stride == _contiguous(self.size):
                return base.view(self.size)
        return base.as_strided(self.size, self.stride, self.offset)


def renew(module: nn.Module) -> None:
    """Have a module's forward take views that it keeps from the parameters that it has then."""
    views = tuple(_found(module))
    if views and "forward" not in vars(module):
        vars(module)["forward"] = MethodType(_Forward(type(module).forward, views), module)


class _Forward:
    """The forward of a class, with these views; bound to a module, and to each copy of it."""

    def __init__(self, forward: Any, views: Sequence[_View]) -> None:
        self._forward = forward
        self._views = views
        functools.update_wrapper(self, forward)

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _calls, _renewed(module, self._views):  # of several threads
            return self._forward(module, *args, **kwargs)


@contextmanager
def _renewed(module: nn.Module, views: Sequence[_View]) -> Iterator[None]:
    kept = [(vars(module.get_submodule(v.part)), v.attribute) for v in views]
    before = [attributes_of[name] for attributes_of, name in kept]
    try:
        for view, (attributes_of, name) in zip(views, kept, strict=True):
            owner, _, leaf = view.parameter.rpartition(".")
            new = view.of(getattr(module.get_submodule(owner), leaf))
            attributes_of[name] = _with(attributes_of[name], view.keys, new)
        yield
    finally:
        for (attributes_of, name), value in zip(reversed(kept), reversed(before), strict=True):
            attributes_of[name] = value


def _with(value: Any, keys: tuple[Any, ...], new: Tensor) -> Any:
    """`value`, or a copy with another tensor in it."""
    if not keys:
        return new
    key, *others = keys
    inside = _with(value[key], tuple(others), new)
    if isinstance(value, tuple):
        return tuple(inside if i == key else each for i, each in enumerate(value))
    copied = copy.copy(value)
    copied[key] = inside
    return copied


def _found(module: nn.Module) -> Iterator[_View]:
    names = {id(p): name for name, p in module.named_parameters()}
    for path, part in module.named_modules():
        for attribute, value in attributes(part).items():
            for keys, tensor in _tensors(value):
                base = tensor._base
                if base is None or id(base) not in names or not tensor.requires_grad:
                    continue
                if (
                    base.is_contiguous()
                    and not base.storage_offset()
                    and base.dtype == tensor.dtype
                ):
                    size, stride = tuple(tensor.shape), tensor.stride()
                    offset = int(tensor.storage_offset())
                    yield _View(path, attribute, keys, names[id(base)], size, stride, offset)


def _tensors(value: Any) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """It, or those that it holds, and the way there."""
    if isinstance(value, Tensor):
        yield (), value
    elif isinstance(value, dict | list) or type(value) is tuple:
        for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            for keys, tensor in _tensors(each):
                yield (key, *keys), tensor


def _contiguous(size: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(size[i + 1 :]) for i in range(len(size)))
