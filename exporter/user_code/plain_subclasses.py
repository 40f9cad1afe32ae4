"""Subclasses of `torch.Tensor` that model code makes of its tensors, as VSSD's `tTensor(x)`.

Under a dispatch mode, as in a capture, torch makes no such object: a tensor has one there already,
of a class of the mode's own. Where a subclass has nothing to it but how sizes are read, the tensor
itself serves; the model run eagerly, without a mode, has the subclass, and is compared with that.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["allow"]

_SIZES = {"shape", "size"}
# What Python says of every class that is written out.
_PYTHONS = {
    "__annotations__",
    "__dict__",
    "__doc__",
    "__firstlineno__",
    "__module__",
    "__qualname__",
    "__static_attributes__",
    "__weakref__",
}


def allow() -> None:
    """Have such subclasses that are defined by now give the tensor itself under a dispatch mode.

    Elsewhere they are as ever. Those that have more to them are left alone: torch refuses them.
    """
    for subclass in _subclasses(Tensor):
        if subclass.__module__.partition(".")[0] != "torch" and _only_sizes(subclass):
            subclass.__new__ = _new  # type: ignore[method-assign]


def _subclasses(parent: type[Tensor]) -> Iterator[type[Tensor]]:
    for subclass in parent.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _only_sizes(subclass: type) -> bool:
    for parent in subclass.__mro__[: subclass.__mro__.index(Tensor)]:
        own = vars(parent)
        if own.keys() - _PYTHONS - _SIZES - ({"__new__"} if own.get("__new__") is _new else set()):
            return False
    return True


def _new(cls: type, *args: Any, **kwargs: Any) -> Any:
    watched = torch._C._len_torch_dispatch_stack() > 0
    if watched and len(args) == 1 and isinstance(args[0], Tensor) and _only_sizes(cls):
        return args[0].view_as(args[0])
    return Tensor.__new__(cls, *args, **kwargs)
