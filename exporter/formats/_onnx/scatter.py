"""What adds to places that occur more than once, in terms of `scatter_add`.

torch.onnx makes `ScatterND` with a reduction of `index_put`. ONNX Runtime's kernel of that loses
updates where places recur and it has several threads: its threads add to one row at once. Its
`ScatterElements`, which `scatter_add` becomes, adds in order.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fuseport.exporter.program.portable._bags import BAGS

__all__ = ["ADDING", "embedding_dense_backward", "index_add", "index_put", "put", "unfold_backward"]

aten = torch.ops.aten


def index_put(
    x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Any:
    """`aten.index_put`; NotImplemented where it does not add, and for masks."""
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if not accumulate or any(index.dtype in (torch.bool, torch.uint8) for _, index in given):
        return NotImplemented
    dims = [dim for dim, _ in given]
    places = torch.broadcast_tensors(*(index for _, index in given))
    rest = [dim for dim in range(x.dim()) if dim not in dims]
    # Where the result of indexing has the dimensions of the indices: in place of dims that are
    # neighbours, else first.
    first = dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0
    shape = [x.shape[dim] for dim in rest]
    shape[first:first] = places[0].shape
    rank = places[0].dim()
    moved = values.expand(shape).movedim(tuple(range(first, first + rank)), tuple(range(rank)))
    row = torch.zeros_like(places[0])
    for dim, place in zip(dims, places, strict=True):
        size = x.shape[dim]
        row = row * size + torch.where(place < 0, place + size, place)
    order = [*dims, *rest]
    table = x.permute(order)
    rows = table.reshape(_product(x.shape[d] for d in dims), _product(x.shape[d] for d in rest))
    added = _add(rows, row.reshape(-1), moved.reshape(row.numel(), rows.shape[1]))
    back = [order.index(dim) for dim in range(x.dim())]
    return added.reshape(table.shape).permute(back)


def index_add(x: Tensor, dim: int, index: Tensor, source: Tensor, alpha: Any = 1) -> Tensor:
    """`aten.index_add`."""
    if x.dim() == 0:
        whole: Tensor = x + alpha * source.sum()
        return whole
    rows, added = x.movedim(dim, 0), source.movedim(dim, 0) * alpha
    table, values = (each.unsqueeze(-1).flatten(1) for each in (rows, added))
    flat = _add(table, index.reshape(-1), values)
    summed: Tensor = flat.reshape(rows.shape).movedim(0, dim)
    return summed


def put(x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    """`aten.put`, by places in the flattened tensor, those from behind below zero as in ONNX."""
    flat, places, values = x.reshape(-1, 1), index.reshape(-1), source.reshape(-1, 1)
    if accumulate:
        return _add(flat, places, values).reshape(x.shape)
    written: Tensor = flat.scatter(0, places.unsqueeze(1), values).reshape(x.shape)
    return written


def embedding_dense_backward(
    cotangent: Tensor, indices: Tensor, rows: int, padding_row: int, by_frequency: bool
) -> Tensor:
    """`aten.embedding_dense_backward`."""
    if by_frequency:
        raise ValueError("embedding with scale_grad_by_freq has no ONNX form of its gradient")
    if padding_row >= 0:
        # Not by a product: nothing of that row is taken, NaN as little as numbers.
        cotangent = torch.where((indices == padding_row).unsqueeze(-1), 0, cotangent)
    width = cotangent.shape[-1]
    zeros = cotangent.new_zeros((rows, width))
    return _add(zeros, indices.reshape(-1), cotangent.reshape(indices.numel(), width))


def unfold_backward(
    cotangent: Tensor, sizes: Sequence[int], dim: int, size: int, step: int
) -> Tensor:
    """`aten.unfold_backward`; torch's `istft` adds up one window for a whole batch by it."""
    dim %= len(sizes)
    count = cotangent.shape[dim]
    cotangent = cotangent.expand([*sizes[:dim], count, *sizes[dim + 1 :], size])
    starts = torch.arange(count, device=cotangent.device) * step
    index = (starts[:, None] + torch.arange(size, device=cotangent.device)).flatten()
    values = cotangent.movedim(-1, dim + 1).flatten(dim, dim + 1)
    return index_add(cotangent.new_zeros(sizes), dim, index, values)


def _add(rows: Tensor, row: Tensor, values: Tensor) -> Tensor:
    """rows (n, w) with values (m, w) added to the rows (m,), in float32 at least."""
    # Rows may occur often, and few runtimes scatter half types.
    wide = torch.promote_types(rows.dtype, torch.float32) if rows.is_floating_point() else None
    index = row.to(torch.int64).unsqueeze(1).expand(values.shape)
    if wide is None:
        return rows.scatter_add(0, index, values)
    return rows.to(wide).scatter_add(0, index, values.to(wide)).to(rows.dtype)


def _of_as_many(operator: Any) -> Callable[..., Any]:
    """Of what is written, as many as there are places: torch leaves the others alone."""

    def form(x: Tensor, dim: int, index: Tensor, values: Tensor, *more: Any, **named: Any) -> Any:
        sizes = list(zip(values.shape, index.shape, strict=True))
        if all(statically_known_true(size == count) for size, count in sizes):
            return NotImplemented
        for axis, (size, count) in enumerate(sizes):
            if not statically_known_true(size == count):  # a slice is as long as there is something
                values = values.index_select(axis, torch.arange(count, device=values.device))
        return operator(x, dim, index, values, *more, **named)

    return form


_reduced = _of_as_many(aten.scatter_reduce.two)
_added = _of_as_many(aten.scatter_add.default)


def scatter_reduce(
    x: Tensor,
    dim: int,
    index: Tensor,
    values: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Any:
    """`aten.scatter_reduce`, of whose means torch.onnx writes the last values."""
    if reduce != "mean":
        return _reduced(x, dim, index, values, reduce, include_self=include_self)

    def add(start: Tensor, source: Tensor) -> Tensor:
        found = _added(start, dim, index, source)
        added: Tensor = start.scatter_add(dim, index, source) if found is NotImplemented else found
        return added

    starts = (x, torch.ones_like(x)) if include_self else (torch.zeros_like(x),) * 2
    sums, counts = add(starts[0], values), add(starts[1], torch.ones_like(values))
    rounded = None if x.is_floating_point() else "floor"
    means = torch.div(sums, counts.clamp(min=1), rounding_mode=rounded)
    return torch.where(counts == 0, x, means)


def _product(sizes: Any) -> Any:
    found: Any = 1
    for size in sizes:
        found = found * size
    return found


ADDING: dict[Any, Callable[..., Any]] = {
    aten.index_add.default: index_add,
    aten.put.default: put,
    **{
        operator: _of_as_many(operator) for operator in (aten.scatter.src, aten.scatter_add.default)
    },
    aten.scatter_reduce.two: scatter_reduce,
    aten.embedding_dense_backward.default: embedding_dense_backward,
    aten.unfold_backward.default: unfold_backward,
    **BAGS,  # of which torch.onnx makes loops that ONNX Runtime, 1.31 at least, does not survive
}
"""For each operator that adds where places may recur, what ONNX Runtime adds rightly."""
