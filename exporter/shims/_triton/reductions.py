"""Sums, extremes, scans and orders of a block, as `triton.language` has them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fuseport.exporter.shims._triton.dtypes import as_dtype
from fuseport.exporter.shims._triton.programs import Unknown, programs
from fuseport.exporter.shims._triton.shapes import axis_of, whole
from fuseport.exporter.shims._triton.values import Value, as_value

__all__ = ["REDUCTIONS"]


def _reduced(
    x: Value, axis: Any, keep_dims: Any, function: Callable[[Tensor, list[int]], Tensor]
) -> Value:
    axes, tensor = len(programs().at_once), whole(x)
    dims = [axes + i for i in range(x.rank)] if axis is None else [axis_of(x, axis)]
    if not dims:  # of a number
        return x
    out = function(tensor, dims)
    if keep_dims:
        for dim in dims:
            out = out.unsqueeze(dim)
    return Value(out, x.rank - (0 if keep_dims else len(dims)))


def _sum(x: Value, axis: Any = None, keep_dims: Any = False, dtype: Any = None, **by: Any) -> Value:
    wanted = as_dtype(dtype) if dtype is not None else None
    given = x.dtype
    narrow = given.is_int() and given.primitive_bitwidth < 32
    as_ = wanted.torch if wanted else torch.int32 if narrow else given.torch
    return _reduced(x, axis, keep_dims, lambda t, dims: t.to(as_).sum(dims, dtype=as_))


def _extreme(name: str) -> Callable[..., Any]:
    def of_block(
        x: Value,
        axis: Any = None,
        return_indices: Any = False,
        return_indices_tie_break_left: Any = True,
        keep_dims: Any = False,
        **by: Any,
    ) -> Any:
        if x.dtype.primitive_bitwidth < 32:
            wide = torch.float32 if x.dtype.is_floating() else torch.int32
            x = Value(x.tensor.to(wide), x.rank)
        if return_indices:
            places = _PLACES[name](x, axis, keep_dims=keep_dims)
            return of_block(x, axis, keep_dims=keep_dims), places
        return _reduced(x, axis, keep_dims, getattr(torch, f"a{name}"))

    return of_block


def _place(name: str) -> Callable[..., Value]:
    """Of the first of equal ones."""

    def of_block(
        x: Value, axis: Any = None, tie_break_left: Any = True, keep_dims: Any = False, **by: Any
    ) -> Value:
        if axis is None and x.rank != 1:
            raise Unknown(f"arg{name} of a block of {x.rank} dimensions without an axis")
        function = getattr(torch, f"arg{name}")
        at = 0 if axis is None else axis
        found = _reduced(x, at, keep_dims, lambda t, dims: function(t, dims[0]))
        return Value(found.tensor.to(torch.int32), found.rank)

    return of_block


_PLACES = {name: _place(name) for name in ("max", "min")}


def _tuple(x: Any) -> tuple[Value, ...]:
    return x if isinstance(x, tuple) else (x,)


def _as_given(x: Any, out: tuple[Value, ...]) -> Any:
    return out if isinstance(x, tuple) else out[0]


def _combined(
    function: Callable[..., Any], left: list[Tensor], right: list[Tensor], rank: int
) -> list[Tensor]:
    values = [Value(t, rank) for t in (*left, *right)]
    return [v.tensor for v in _tuple(function(*values))]


def _reduce(x: Any, axis: Any, combine_fn: Any, keep_dims: Any = False, **by: Any) -> Any:
    """By a function of two, in a tree."""
    blocks = _tuple(x)
    rank = blocks[0].rank
    if axis is None:
        flat = tuple(Value(whole(b).flatten(-rank), 1) for b in blocks)
        return _reduce(_as_given(x, flat), 0, combine_fn, keep_dims)
    dim = axis_of(blocks[0], axis)
    parts = [whole(b) for b in blocks]
    while (size := _static(parts[0].shape[dim])) > 1:
        half = size // 2
        left = [p.narrow(dim, 0, half) for p in parts]
        right = [p.narrow(dim, half, half) for p in parts]
        rest = [p.narrow(dim, 2 * half, size - 2 * half) for p in parts]
        parts = _combined(combine_fn, left, right, rank)
        if size % 2:
            parts = [torch.cat(pair, dim) for pair in zip(parts, rest, strict=True)]
    if keep_dims:
        return _as_given(x, tuple(Value(p, rank) for p in parts))
    return _as_given(x, tuple(Value(p.squeeze(dim), rank - 1) for p in parts))


def _static(size: Any) -> int:
    if not isinstance(size, int):
        raise Unknown(
            "it combines a dynamic number of elements by a function of its own: export that "
            "dimension with a fixed size"
        )
    return size


def _associative_scan(x: Any, axis: Any, combine_fn: Any, reverse: Any = False, **by: Any) -> Any:
    """By a function of two: each place combined with those before, in steps of 1, 2, 4, …"""
    blocks = _tuple(x)
    rank, dim = blocks[0].rank, axis_of(blocks[0], axis)
    parts = [whole(b) for b in blocks]
    if reverse:
        parts = [p.flip(dim) for p in parts]
    size, step = _static(parts[0].shape[dim]), 1
    while step < size:
        before = [p.narrow(dim, 0, size - step) for p in parts]
        here = [p.narrow(dim, step, size - step) for p in parts]
        first = [p.narrow(dim, 0, step) for p in parts]
        new = _combined(combine_fn, before, here, rank)
        parts = [torch.cat(pair, dim) for pair in zip(first, new, strict=True)]
        step *= 2
    if reverse:
        parts = [p.flip(dim) for p in parts]
    return _as_given(x, tuple(Value(p, rank) for p in parts))


def _cumulative(function: Callable[..., Tensor]) -> Callable[..., Value]:
    def of_block(
        x: Value, axis: Any = 0, reverse: Any = False, dtype: Any = None, **by: Any
    ) -> Value:
        dim, tensor = axis_of(x, axis), whole(x)
        if dtype is not None and (wanted := as_dtype(dtype)) is not None:
            tensor = tensor.to(wanted.torch)
        elif x.dtype.is_int() and x.dtype.primitive_bitwidth < 32:
            tensor = tensor.to(torch.int32)
        if not reverse:
            return Value(function(tensor, dim, dtype=tensor.dtype), x.rank)
        return Value(function(tensor.flip(dim), dim, dtype=tensor.dtype).flip(dim), x.rank)

    return of_block


def _sort(x: Value, dim: Any = None, descending: Any = False, **by: Any) -> Value:
    """Along the last dimension."""
    at = axis_of(x, -1 if dim is None else dim)
    return Value(whole(x).sort(at, descending=bool(descending)).values, x.rank)


def _topk(x: Value, k: Any, dim: Any = None, **by: Any) -> Value:
    """The largest along the last dimension, from the largest on."""
    found = _sort(x, dim, descending=True)
    return Value(found.tensor.narrow(axis_of(x, -1 if dim is None else dim), 0, int(k)), x.rank)


def _histogram(x: Value, num_bins: Any, mask: Any = None, **by: Any) -> Value:
    """How often each of the first integers is in a block of one dimension."""
    values, kept = whole(x), None if mask is None else as_value(mask).at_rank(x.rank).tensor
    bins = torch.arange(int(num_bins), device=values.device)
    found = values.unsqueeze(-1) == bins
    if kept is not None:
        found = found & kept.to(torch.bool).unsqueeze(-1)
    return Value(found.to(torch.int32).sum(-2, dtype=torch.int32), 1)


def _either(x: Value, axis: Any = None, keep_dims: Any = False, **by: Any) -> Value:
    found: Value = _reduce(x, axis, lambda a, b: a | b, keep_dims)
    return found


def _xor_sum(x: Value, axis: Any = None, keep_dims: Any = False, **by: Any) -> Value:
    found: Value = _reduce(x, axis, lambda a, b: a ^ b, keep_dims)
    return found


REDUCTIONS: dict[str, Any] = {
    "sum": _sum,
    "max": _extreme("max"),
    "min": _extreme("min"),
    "argmax": _PLACES["max"],
    "argmin": _PLACES["min"],
    "xor_sum": _xor_sum,
    "reduce_or": _either,
    "topk": _topk,
    "histogram": _histogram,
    "reduce": _reduce,
    "associative_scan": _associative_scan,
    "cumsum": _cumulative(torch.cumsum),
    "cumprod": _cumulative(torch.cumprod),
    "sort": _sort,
}
"""By name, functions of `triton.language`."""
