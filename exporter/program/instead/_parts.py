"""Parts of a tensor along a dynamic dimension, as many as a number says, or of so many elements."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

__all__ = ["PARTS", "named", "unlike_the_usual"]


def named(names: Sequence[str], args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a function by these names, those by position first."""
    return {**dict(zip(names, args, strict=False)), **kwargs}


def unlike_the_usual(options: Mapping[str, Any]) -> bool:
    """Whether options of a function that makes a tensor ask for another kind of one."""
    return any(value not in (None, False, torch.strided) for value in options.values())


def _split(*args: Any, **kwargs: Any) -> Any:
    given = named(("tensor", "size", "dim"), args, kwargs)
    x, dim = given.get("tensor"), given.get("dim", 0)
    size = given.get("size", given.get("split_size", given.get("split_size_or_sections")))
    if type(size) is int and size == 1:  # as many as there are: a loop
        return NotImplemented
    if x is None or not isinstance(size, int | torch.SymInt) or _is_known(x.shape[dim], size):
        return NotImplemented
    return _parts(x, size, dim)


def _chunk(*args: Any, **kwargs: Any) -> Any:
    given = named(("input", "chunks", "dim"), args, kwargs)
    x, chunks, dim = given.get("input"), given.get("chunks"), given.get("dim", 0)
    if x is None or not isinstance(chunks, int) or _is_known(x.shape[dim]):
        return NotImplemented
    return _parts(x, (x.shape[dim] + chunks - 1) // chunks, dim)


def _tensor_split(*args: Any, **kwargs: Any) -> Any:
    given = named(("input", "parts", "dim"), args, kwargs)
    x, dim = given.get("input"), given.get("dim", 0)
    parts = given.get("parts", given.get("sections", given.get("indices_or_sections")))
    if x is None or not isinstance(parts, int) or _is_known(x.shape[dim]):
        return NotImplemented
    # The first ones have one more, as many as are left over, which torch takes for a number.
    each, over = x.shape[dim] // parts, x.shape[dim] % parts
    starts = [each * i + torch.sym_min(over, i) for i in range(parts + 1)]
    sizes = [end - start for start, end in pairwise(starts)]
    return tuple(x.narrow(dim, *part) for part in zip(starts, sizes, strict=False))


def _is_known(*sizes: int | torch.SymInt) -> bool:
    return all(isinstance(size, int) for size in sizes)


def _parts(x: Tensor, size: int | torch.SymInt, dim: int) -> tuple[Tensor, ...]:
    # Where these are no numbers, torch would know the parts by number, and take them for fixed
    # ones: in their gradients, and in ONNX.
    whole = x.shape[dim]
    count = int((whole + size - 1) // size)
    parts: tuple[Tensor, ...] = x.split([size] * (count - 1) + [whole - size * (count - 1)], dim)
    return parts


PARTS: Mapping[Any, Callable[..., Any]] = {
    getattr(of, name): form
    for name, form in (("split", _split), ("chunk", _chunk), ("tensor_split", _tensor_split))
    for of in (torch, Tensor)
}
"""What computes the same, or gives NotImplemented, where the function itself fixes nothing."""
