"""The functions of `triton.language` that make blocks and give them other shapes."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fuseport.exporter.shims._triton.dtypes import as_dtype
from fuseport.exporter.shims._triton.memory import Pointer
from fuseport.exporter.shims._triton.places import Linear
from fuseport.exporter.shims._triton.programs import Unknown, programs
from fuseport.exporter.shims._triton.values import Value, as_value

__all__ = ["SHAPES", "axis_of", "both", "size_of", "torch_dtype", "whole"]


def torch_dtype(dtype: Any) -> torch.dtype:
    """torch's dtype for one of Triton's."""
    found = as_dtype(dtype)
    if found is None:
        raise Unknown(f"the dtype {dtype}")
    return found.torch


def axis_of(x: Value, axis: Any) -> int:
    """The dimension of the tensor that is a block's."""
    number = int(axis)
    if not -x.rank <= number < x.rank:
        raise Unknown(f"dimension {number} of a block of {x.rank}")
    return len(programs().at_once) + number % x.rank


def size_of(size: Any) -> Any:
    """A number that a kernel has, as Python's own."""
    return size.number if isinstance(size, Value) and size.number is not None else size


def _sizes(shape: Any, *more: Any) -> list[Any]:
    given = shape if isinstance(shape, tuple | list) else (shape, *more)
    return [size_of(size) for size in given]


def _ones() -> list[int]:
    return [1] * len(programs().at_once)


def arange(start: Any, end: Any, **by: Any) -> Value:
    """The integers from `start` to `end`, without that."""
    first, stop = size_of(start), size_of(end)
    return Value(Linear(first, (*[0] * len(_ones()), 1), (*_ones(), stop - first)), 1)


def full(shape: Any, value: Any, dtype: Any, **by: Any) -> Value:
    """A block of one number."""
    sizes = _sizes(shape)
    of = as_value(value).at_rank(len(sizes)).tensor.to(torch_dtype(dtype))
    return Value(of.expand([*of.shape[: len(_ones())], *sizes]), len(sizes))


def zeros(shape: Any, dtype: Any, **by: Any) -> Value:
    """A block of zeros."""
    return full(shape, 0, dtype)


def zeros_like(x: Value, **by: Any) -> Value:
    """A block of zeros, like another."""
    return full(x.shape, 0, x.dtype)


def expand_dims(x: Any, axis: Any, **by: Any) -> Any:
    """With one more dimension, or several."""
    value = as_value(x) if not isinstance(x, Pointer) else x.at
    axes = axis if isinstance(axis, tuple | list) else (axis,)
    rank = value.rank + len(axes)
    at = {int(a) % rank for a in axes}
    return x[tuple(None if i in at else slice(None) for i in range(rank))]


def both(first: Any, other: Any) -> tuple[Value, Value, int]:
    """Two values with as many dimensions, and how many these are."""
    a, b = as_value(first), as_value(other)
    rank = max(a.rank, b.rank)
    return a.at_rank(rank), b.at_rank(rank), rank


def broadcast(x: Any, y: Any, **by: Any) -> tuple[Value, Value]:
    """Two blocks of the sizes that they have together."""
    a, b, _ = both(x, y)
    sizes = torch.broadcast_shapes(a.shape, b.shape)
    return broadcast_to(a, sizes), broadcast_to(b, sizes)


def broadcast_to(x: Any, shape: Any, *more: Any, **by: Any) -> Any:
    """A block, repeated along dimensions of one place."""
    sizes = _sizes(shape, *more)
    if isinstance(x, Pointer):
        # Whatever is added to it repeats it.
        return Pointer(x.memory, _as_wide(x.at, sizes))
    return _as_wide(as_value(x), sizes)


def _as_wide(x: Value, sizes: Sequence[Any]) -> Value:
    x = x.at_rank(len(sizes))
    if (linear := x.linear) is not None:
        wide = Linear(0, (0,) * len(linear.sizes), (*_ones(), *sizes))
        return Value(linear + wide, len(sizes))
    tensor = x.tensor
    return Value(tensor.expand([*tensor.shape[: len(_ones())], *sizes]), len(sizes))


def reshape(x: Value, *shape: Any, **by: Any) -> Value:
    """The same elements in a block of other sizes."""
    sizes = _sizes(*shape) if shape else _sizes(by["shape"])
    tensor = whole(x)
    return Value(tensor.reshape([*tensor.shape[: len(_ones())], *sizes]), len(sizes))


def whole(x: Value) -> Tensor:
    """With every dimension of the block at its full size."""
    tensor, axes = x.tensor, len(programs().at_once)
    return tensor.expand([*tensor.shape[:axes], *x.shape])


def ravel(x: Value, **by: Any) -> Value:
    """All elements as one dimension."""
    return reshape(x, [math.prod(x.shape)])


def permute(x: Value, *dims: Any, **by: Any) -> Value:
    """Dimensions in another order."""
    order = [d % x.rank for d in _sizes(*(dims or (by["dims"],)))]
    axes = len(_ones())
    return Value(x.tensor.permute([*range(axes), *(axes + d for d in order)]), x.rank)


def trans(x: Value, *dims: Any, **by: Any) -> Value:
    """The last two dimensions swapped, or all in another order."""
    if dims or by.get("dims"):
        return permute(x, *(dims or (by["dims"],)))
    return permute(x, [*range(x.rank - 2), x.rank - 1, x.rank - 2])


def join(a: Any, b: Any, **by: Any) -> Value:
    """Two blocks along a new last dimension."""
    x, y, rank = both(*broadcast(a, b))
    return Value(torch.stack(torch.broadcast_tensors(x.tensor, y.tensor), -1), rank + 1)


def split(x: Value, **by: Any) -> tuple[Value, Value]:
    """The two parts along the last dimension, of two places."""
    first, second = whole(x).unbind(-1)
    return Value(first, x.rank - 1), Value(second, x.rank - 1)


def interleave(a: Any, b: Any, **by: Any) -> Value:
    """Two blocks, one place of each in turn along the last dimension."""
    both = join(a, b)
    return reshape(both, [*both.shape[:-2], both.shape[-2] * 2])


def cat(a: Value, b: Value, can_reorder: bool = False, dim: Any = 0, **by: Any) -> Value:
    """Two blocks one behind the other."""
    x, y = whole(a), whole(b)
    axes = len(_ones())
    lead = torch.broadcast_shapes(x.shape[:axes], y.shape[:axes])
    x, y = (t.expand([*lead, *t.shape[axes:]]) for t in (x, y))
    return Value(torch.cat((x, y), axes + int(dim)), a.rank)


def flip(x: Value, dim: Any = None, **by: Any) -> Value:
    """In the opposite order along a dimension, the last by default."""
    return Value(whole(x).flip(axis_of(x, -1 if dim is None else dim)), x.rank)


def gather(src: Value, index: Any, axis: Any, **by: Any) -> Value:
    """Of a block, along a dimension, the places that another one has."""
    x, places = whole(src), whole(as_value(index)).to(torch.int64)
    axes = len(_ones())
    lead = torch.broadcast_shapes(x.shape[:axes], places.shape[:axes])
    x, places = (t.expand([*lead, *t.shape[axes:]]) for t in (x, places))
    return Value(x.gather(axis_of(src, axis), places), src.rank)


def squeeze(x: Value, dim: Any, **by: Any) -> Value:
    """Without a dimension of one place."""
    sizes = [*x.shape]
    del sizes[int(dim) % x.rank]
    return reshape(x, sizes)


_OWN = (
    arange, full, zeros, zeros_like, expand_dims, broadcast, broadcast_to, reshape, ravel, permute,
    trans, join, split, interleave, cat, flip, gather,
    squeeze,
)  # fmt: skip
SHAPES: dict[str, Any] = {
    **{function.__name__: function for function in _OWN},
    "view": reshape,
    "unsqueeze": expand_dims,
    "T": trans,
}
"""By name, functions of `triton.language`."""
