"""Code that asks for a value of a tensor to decide by is answered."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fuseport.exporter.program.sizes import _of_sizes, _tables
from fuseport.exporter.program.sizes.numbers import as_number

__all__ = ["answered"]

aten = torch.ops.aten


@contextmanager
def answered(
    answer: Callable[[Tensor, FrameType], bool], *, unknown: bool = False
) -> Iterator[None]:
    """Meanwhile, code that asks for a value to decide by is answered.

    Args:
        answer: what a condition comes to that code asks for in a frame.
        unknown: whether there are no values yet.
    """
    with _Asked(answer, unknown=unknown), _checking():
        yield


@contextmanager
def _checking() -> Iterator[None]:
    """Meanwhile `torch._check` and its kin take numbers that stay tensors, for what they are."""
    own: Callable[..., None] = torch._check_with

    def check(error: type[Exception], condition: Any, message: Any) -> None:
        if isinstance(condition, Tensor):
            condition = aten._local_scalar_dense.default(condition)
        own(error, condition, message)

    with mock.patch.object(torch, "_check_with", check):
        yield


class _Asked(TorchFunctionMode):
    """Answers code that asks for a value to decide by; numbers of tensors stay tensors meanwhile,
    for what is computed of them to be seen."""

    def __init__(
        self, answer: Callable[[Tensor, FrameType], bool], *, unknown: bool = False
    ) -> None:
        super().__init__()
        self._answer, self._unknown = answer, unknown
        self._truths: list[tuple[Tensor, int, Tensor | None]] = []
        self._conditions = {**_CONDITIONS, **dict.fromkeys(_TRUTHS, self._truth)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        args, kwargs = _of_sizes.taken(func, args, kwargs)
        _of_sizes.forget(func, args, kwargs)
        if func is Tensor.__format__ and self._unknown:  # for a message
            return "a value"
        if func in _CHECKING:
            # torch hides from a mode what its functions in Python ask themselves.
            asked = mock.patch.object(functional, "has_torch_function_variadic", return_value=False)
            with asked, self:
                return func(*args, **kwargs)
        if (size := _of_sizes.read(func, args)) is not None:
            return size
        if func in _NUMBERS and _is_single(args[0]):
            size = _tables.read(func, args)
            return as_number(args[0]) if size is None else size
        condition = self._conditions[func](*args, **kwargs) if func in self._conditions else None
        if condition is None:
            result = func(*args, **kwargs)
            _of_sizes.note(func, args, kwargs, result)
            return result
        with torch.no_grad():
            return self._answer(condition, sys._getframe(1))

    def _truth(self, x: Tensor) -> Tensor | None:
        """`_truth`, of a tensor that has not changed the very same."""
        if x.is_inference():  # of which torch counts no writes
            return _truth(x)
        for known, version, condition in self._truths:
            if known is x and version == x._version:
                return condition
        self._truths.append((x, x._version, _truth(x)))
        return self._truths[-1][-1]


def _is_single(x: Tensor) -> bool:
    return not x.is_complex() and all(isinstance(n, int) and n == 1 for n in x.shape)


def _truth(x: Tensor) -> Tensor | None:
    """Whether a tensor of one number is true, as a tensor of no dimension."""
    if not _is_single(x):
        return None
    single = x.detach().reshape(())
    return single if single.dtype == torch.bool else single != 0


def _equal(a: Tensor, b: Tensor) -> Tensor | None:
    return (a == b).all() if a.shape == b.shape else None


def _close(
    a: Tensor, b: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> Tensor:
    return torch.isclose(a, b, rtol, atol, equal_nan).all()


_NUMBERS = (Tensor.item,)
_CHECKING = (functional.gaussian_nll_loss,)  # torch's functions that raise errors by values

_TRUTHS = (Tensor.__bool__, Tensor.is_nonzero, torch.is_nonzero)
_CONDITIONS: dict[Any, Callable[..., Tensor | None]] = {
    Tensor.equal: _equal,
    torch.equal: _equal,
    Tensor.allclose: _close,
    torch.allclose: _close,
}
