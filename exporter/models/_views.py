"""Views of parameters that a model's constructor made and keeps: made anew for each call.

A view such as `self.turned = self.layer.weight.T` goes with its parameter in training. A capture
would take it for a constant, and in a copy of the module, or one of another dtype, it would be of
the old parameter. So the module's forward has it of today's parameter instead.
"""

import copy
import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import permutations
from types import MethodType
from typing import Any

from torch import Tensor, nn

from fuseport.exporter.models._attributes import attributes, tensors
from fuseport.exporter.models._forward import rewrap

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
    """Have a module's forward take views that it keeps from the parameters that it has then.

    Args:
        module: as its constructor left it, before it gets other weights.
    """
    own = vars(module).get("forward")
    bound = own is None or (isinstance(own, MethodType) and own.__self__ is module)
    if bound and (views := tuple(_found(module))):
        rewrap(module, functools.partial(_with_views, views))


def _with_views(views: Sequence[_View], forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _calls, _renewed(module, views):  # of several threads
            return forward(module, *args, **kwargs)

    return called


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
    parts = list(value) if isinstance(value, tuple) else copy.copy(value)
    parts[key] = _with(value[key], tuple(others), new)
    if isinstance(value, tuple):
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return parts


def _found(module: nn.Module) -> Iterator[_View]:
    names = {id(p): name for name, p in module.named_parameters()}
    for path, part in module.named_modules():
        for attribute, value in attributes(part).items():
            for keys, tensor in tensors(value):
                base = tensor._base
                if base is None or id(base) not in names or not tensor.requires_grad:
                    continue
                plain = base.is_contiguous() and not base.storage_offset()
                if plain and base.dtype == tensor.dtype and None not in keys:
                    size, stride = tuple(tensor.shape), tensor.stride()
                    offset = int(tensor.storage_offset())
                    yield _View(path, attribute, keys, names[id(base)], size, stride, offset)


def _contiguous(size: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(size[i + 1 :]) for i in range(len(size)))
