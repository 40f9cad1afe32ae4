"""Sizes that stay dynamic in a capture where torch's own code fixes them.

In `x.shape[2:].numel()`, in what `_instead.py` has other functions for, in the order of products.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fuseport.exporter.program.instead import INSTEAD
from fuseport.exporter.program.sequences.packed import Packing, Unmade, with_values
from fuseport.exporter.program.sizes import _known, _of_sizes, _ranges_of_numbers, _tables

__all__ = ["Symbolic", "orders_of_products"]

_USUAL = 16  # a size of which nothing is known


class Symbolic(TorchFunctionMode):
    """Computes the same by other functions of torch where a size would become a number."""

    def __init__(self) -> None:
        super().__init__()
        self._packing = Packing()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packed = self._packing.result(func, args, kwargs)
        if packed is not NotImplemented:
            return packed
        _ranges_of_numbers.forget(args)
        if (size := _of_sizes.read(func, args)) is not None:
            return size
        args, kwargs = _of_sizes.taken(func, args, kwargs)
        _of_sizes.forget(func, args, kwargs)
        if (read := _tables.read(func, args)) is not None:
            return read
        args, kwargs = _tables.taken(func, args, kwargs)
        _tables.forget(func, args, kwargs)
        if any(issubclass(kind, Unmade) for kind in types):
            args, kwargs = with_values((tuple(args), kwargs))
        if (number := _known.number(func, args)) is not None:
            return number
        form = INSTEAD.get(func)
        if form is not None and (made := form(*args, **kwargs)) is not NotImplemented:
            _tables.note(func, args, kwargs, made)
            return made
        result = func(*args, **kwargs)
        _ranges_of_numbers.note(func, args, kwargs, result)
        _of_sizes.note(func, args, kwargs, result)
        _tables.note(func, args, kwargs, result)
        if isinstance(result, torch.Size) and any(
            isinstance(size, torch.SymInt) for size in result
        ):
            return _Sizes(result)
        return result


class _Sizes(tuple[Any, ...]):
    """A `torch.Size` whose `numel` is no number where the sizes are none.

    Torch's own cannot be derived from; for `isinstance` this is one.
    """

    __class__ = property(lambda self: torch.Size)

    def numel(self) -> Any:
        return math.prod(self)

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return _Sizes(found) if isinstance(index, slice) else found


@contextmanager
def orders_of_products() -> Iterator[None]:
    """Have `einsum` of several tensors find its order at the sizes of the example.

    The package opt_einsum, where it is here, makes numbers of them, and they would be fixed.
    """
    whole = torch.backends.opt_einsum.get_opt_einsum()
    if whole is None:
        yield
        return

    def contract_path(equation: str, *operands: Tensor, **options: Any) -> Any:
        examples = (torch.empty([*map(_hint, x.shape)], device="meta") for x in operands)
        return whole.contract_path(equation, *examples, **options)

    paths = SimpleNamespace(contract_path=contract_path)
    with mock.patch.object(torch.backends.opt_einsum, "get_opt_einsum", return_value=paths):
        yield


def _hint(size: int | torch.SymInt) -> int:
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else _USUAL
