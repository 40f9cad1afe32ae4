"""Operators whose forms in ONNX, or in ONNX Runtime, take none for something else.

Of a size that may be 0, such as how many a mask selects. The form that torch.onnx has of some
reshapes to sizes of which one is left open, for which a size of 0 is the one that stood there.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._decomp import decomposition_table
from torch.export import ExportedProgram

from fuseport.exporter.formats._onnx import products
from fuseport.exporter.program.regions import nodes
from fuseport.exporter.program.rewriting import Table
from fuseport.exporter.program.sizes.bounds import may_be_none

__all__ = ["is_none_ever", "of_none"]

aten = torch.ops.aten


def of_none(exported: ExportedProgram) -> Table:
    """Forms for a program in which a size may be 0; of others, for what may be of too few."""
    return _OF_NONE if any(map(is_none_ever, nodes(exported.graph_module))) else _OF_FEW


def is_none_ever(node: fx.Node) -> bool:
    """Whether it is a tensor of which a size may be 0."""
    return _is_none_ever(node.meta.get("val"))


def _is_none_ever(value: Any) -> bool:
    return isinstance(value, Tensor) and any(map(may_be_none, value.shape))


def _repeats(repeats: Tensor, *, output_size: int | None = None) -> Any:
    # One more, of which there is none, for how many there are to be found at the last of some.
    if not may_be_none(repeats.shape[0]):
        return NotImplemented
    return aten.repeat_interleave.Tensor(F.pad(repeats, (0, 1)), output_size=output_size)


def _im2col(x: Tensor, *sizes: Any) -> Any:
    return (
        decomposition_table[aten.im2col.default](x, *sizes) if _is_none_ever(x) else NotImplemented
    )


def _mean(x: Tensor, *, dtype: torch.dtype | None = None) -> Any:
    return _mean_dim(x, None, dtype=dtype)


def _mean_dim(
    x: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    # ONNX Runtime's mean of none is 0, where torch has NaN.
    dims = list(dim or range(x.dim()))
    count = math.prod(x.shape[i] for i in dims)
    if not may_be_none(count):
        return NotImplemented
    return x.sum(dims, keepdim, dtype=dtype) / count


def _mse_loss(x: Tensor, *more: Any) -> Any:
    return (
        decomposition_table[aten.mse_loss.default](x, *more) if _is_none_ever(x) else NotImplemented
    )


def _var(
    x: Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> Tensor:
    dims = list(dim or range(x.dim()))
    count = math.prod(x.shape[i] for i in dims)
    wide = torch.promote_types(x.dtype, torch.float32)  # halves do not hold such sums
    x = x.to(wide)
    squares = (x - x.sum(dims, True) / count).square().sum(dims, keepdim)
    free = torch.scalar_tensor(count, dtype=wide) - (1 if correction is None else correction)
    return squares / free.clamp(min=0)


def _var_of_few(x: Tensor, *more: Any, correction: float | None = None, **others: Any) -> Any:
    # ONNX's own divides by less than none where there are fewer than it takes away.
    beyond = correction is not None and correction > 1
    form = _var if beyond else decomposition_table[aten.var.correction]
    return form(x, *more, correction=correction, **others)


_OF_FEW: Table = {aten.var.correction: _var_of_few}
_OF_NONE: Table = {
    **products.OF_NONE,
    aten.mean.default: _mean,
    aten.mean.dim: _mean_dim,
    aten.mse_loss.default: _mse_loss,
    aten.var.correction: _var,
    aten.im2col.default: _im2col,
    aten.repeat_interleave.Tensor: _repeats,
}
