"""Values by their rank in a dimension, which ONNX gives by TopK alone, and products of many."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fuseport.exporter.program.rewriting import Table

__all__ = ["OF_INTEGERS", "RANKS"]

aten = torch.ops.aten


def _kth(x: Tensor, k: Any, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    if x.dim() == 0:
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    values, indices = torch.topk(x, k, dim, largest=False, sorted=True)
    value, index = (aten.select.int(found, dim, -1) for found in (values, indices))
    return (value.unsqueeze(dim), index.unsqueeze(dim)) if keepdim else (value, index)


def _median(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The lower one of two; NaN where one is."""
    if x.dim() == 0:
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    value, index = _kth(x, (x.shape[dim] + 1) // 2, dim, keepdim)
    if x.is_floating_point():
        first, where = x.isnan().to(torch.int32).max(dim, keepdim)
        value = torch.where(first == 1, torch.nan, value)
        index = torch.where(first == 1, where, index)
    return value, index


def _nanmedian(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """The same of what is not NaN; NaN where nothing is left."""
    if x.dim() == 0:
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    some = (~x.isnan()).sum(dim, keepdim=True)
    filled = torch.where(x.isnan(), torch.inf, x)
    values, indices = torch.topk(filled, x.shape[dim], dim, largest=False, sorted=True)
    rank = (some - 1).clamp(min=0) // 2
    value = torch.where(some == 0, torch.nan, values.gather(dim, rank))
    index = indices.gather(dim, rank)
    return (value, index) if keepdim else (value.squeeze(dim), index.squeeze(dim))


def _mode(x: Tensor, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Of values that are equally often the smallest, and of its places the last."""
    if x.dim() == 0:
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    ordered, order = torch.sort(x, dim=dim, stable=True)
    size = x.shape[dim]
    shape = [1] * x.dim()
    shape[dim] = -1
    place = torch.arange(size, device=x.device).reshape(shape).expand(x.shape)
    before = ordered.index_select(dim, (torch.arange(size, device=x.device) - 1).clamp(min=0))
    starts = torch.where((ordered != before) | (place == 0), place, 0)
    often = place - starts.cummax(dim).values
    last = often.argmax(dim, keepdim=True)
    found: Any = (ordered.gather(dim, last), order.gather(dim, last))
    return found if keepdim else (found[0].squeeze(dim), found[1].squeeze(dim))


def _of_all(of_dim: Any, x: Tensor) -> Tensor:
    return of_dim(x.reshape(-1), 0)[0]  # type: ignore[no-any-return]


def _largest_of_booleans(x: Tensor, dim: int, keepdim: bool = False) -> Any:
    if x.dtype != torch.bool:
        return NotImplemented
    value, index = aten.max.dim(x.to(torch.int32), dim, keepdim)
    return value.to(torch.bool), index


def _prod(x: Tensor, dims: Sequence[int] | None, *, output_dtype: Any = None) -> Tensor:
    x = x if output_dtype is None else x.to(output_dtype)
    for dim in sorted(range(x.dim()) if dims is None else dims, reverse=True):
        x = aten.prod.dim_int(x, dim)
    return x


def _over_all(of_dims: Any) -> Any:
    """Without dimensions, of all of them, where ONNX's form wants them named."""

    def found(x: Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
        if dim:
            return NotImplemented
        return of_dims(x, list(range(x.dim())), keepdim) if x.dim() else x.clone()

    return found


RANKS: Table = {
    aten.amax.default: _over_all(aten.amax.default),
    aten.amin.default: _over_all(aten.amin.default),
    aten.kthvalue.default: _kth,
    aten.median.dim: _median,
    aten.mode.default: _mode,
    aten.median.default: lambda x: _of_all(_median, x),
    aten.nanmedian.dim: _nanmedian,
    aten.nanmedian.default: lambda x: _of_all(_nanmedian, x),
    torch.ops.prims.prod.default: _prod,
}


def _either(a: Any, b: Any, *, alpha: Any = 1) -> Any:
    both = all(isinstance(x, Tensor) and x.dtype == torch.bool for x in (a, b))
    return a | b if both and alpha == 1 else NotImplemented


OF_INTEGERS: Table = {
    aten.add.Tensor: _either,
    aten.max.dim: _largest_of_booleans,
    aten.relu.default: lambda x: x.clamp(min=0),
}
"""What gradients of `cumprod` ask of booleans and integers, and those of loops: ONNX's ArgMax, Relu
and Add take none."""
