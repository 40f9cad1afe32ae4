"""`lengths.tolist()` of a dynamic number of integers, in a capture.

Torch has no form of it: a list has as many items as the example. This one stands for the vector, in
what model code makes of such lists: its length, the largest of it, a tensor again.
"""

import builtins
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import SymInt, Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

__all__ = ["Listed", "listing", "of_list"]

_REDUCED: dict[str, Callable[[Tensor], Tensor]] = {
    "max": torch.max,
    "min": torch.min,
    "sum": torch.sum,
}


class Listed(list[Any]):
    """The integers of a vector, as model code has them in a list.

    Attributes:
        tensor: (n,), of integers; n is dynamic.
    """

    def __init__(self, tensor: Tensor) -> None:
        """What goes over a list by C finds one item, of which it can make nothing."""
        super().__init__([_NoNumber()])
        self.tensor = tensor

    def __len__(self) -> int:
        """Of the example."""
        return int(self.tensor.shape[0])

    def __iter__(self) -> Iterator[Any]:
        """Refuses.

        Raises:
            TypeError: always.
        """
        _refuse()

    def __getitem__(self, index: Any) -> Any:
        """One, a number that hangs on values; or some, in a list again."""
        if isinstance(index, slice):
            return Listed(self.tensor[index])
        return self.tensor[index].item()


class _NoNumber:
    def __repr__(self) -> str:
        return "<a list of dynamic length>"

    def __index__(self) -> int:
        _refuse()

    __int__ = __float__ = __bool__ = __index__


def _refuse() -> NoReturn:
    raise TypeError(
        "the items of a list of dynamic length are gone over, which has no form in a program; "
        "compute with the tensor that it was made of"
    )


@contextmanager
def listing() -> Iterator[None]:
    """Have `tolist` give such lists in a capture."""
    with ExitStack() as stack:
        for kind in (FakeTensor, FunctionalTensor):
            stack.enter_context(mock.patch.object(kind, "tolist", _or_listed(kind.tolist)))
        for name, reduced in _REDUCED.items():  # which torch replaces in a capture, too
            other = _or_reduced(getattr(builtins, name), reduced)
            stack.enter_context(mock.patch.object(builtins, name, other))
        yield


def _or_listed(own: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def tolist(x: Tensor) -> Any:
        whole = not x.is_floating_point() and not x.is_complex() and x.dtype != torch.bool
        if whole and x.dim() == 1 and _is_of_inputs(x.shape[0]):
            return Listed(x)
        return own(x)

    return tolist


def _or_reduced(own: Callable[..., Any], reduced: Callable[[Tensor], Tensor]) -> Any:
    def function(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], Listed) and not kwargs:
            return reduced(args[0].tensor).item()
        return own(*args, **kwargs)

    return function


def _is_of_inputs(size: Any) -> bool:
    return isinstance(size, SymInt) and not free_unbacked_symbols(size)


def of_list(func: Any, args: Any, kwargs: Any) -> Tensor | None:
    """The tensor that torch is asked to make of such a list; None if it is asked for others."""
    if func in (torch.tensor, torch.as_tensor):
        like, given = None, args[0] if args else kwargs.get("data")
    elif func in (Tensor.new, Tensor.new_tensor) and len(args) == 2:
        like, given = args
    else:
        return None
    if not isinstance(given, Listed):
        return None
    dtype, device = kwargs.get("dtype"), kwargs.get("device")
    if like is not None:
        dtype, device = dtype or like.dtype, device or like.device
    return given.tensor.to(device=device, dtype=dtype or torch.int64, copy=True)
