"""Sums, products and deviations whose derivatives ask whether there is anything, written out.

Of a size that may be 0, such as how many values a mask selects; products up to each of any size,
which torch's derivative has a turn for each of. Each has the derivative that torch has, zeros of a
product among them, by formulas that nothing is asked for.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fuseport.exporter.program.sizes.bounds import may_be_none

__all__ = ["FOLDS"]

aten = torch.ops.aten


class _CumulativeSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Any:
        ctx.dim = dim
        return aten.cumsum.default(x, dim)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        return _from_the_end(cotangent, ctx.dim), None


class _CumulativeProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Any:
        out = aten.cumprod.default(x, dim)
        ctx.save_for_backward(x, out)
        ctx.dim = dim
        return out

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        # Before the first zero, Σ_j≥i g_j y_j / x_i; of the first, the products without it up to
        # the next; behind it, all products have a zero more.
        x, out = ctx.saved_tensors
        zeros = (x == 0).long().cumsum(ctx.dim)
        first = (x == 0) & (zeros == 1)
        before = torch.where(zeros == 0, cotangent * out, 0)
        slope = _from_the_end(before, ctx.dim) / torch.where(zeros == 0, x, 1)
        without = aten.cumprod.default(torch.where(first, 1, x), ctx.dim)
        of_first = torch.where(zeros == 1, cotangent * without, 0).sum(ctx.dim, True)
        return torch.where(first, of_first, torch.where(zeros == 0, slope, 0)), None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Any:
        ctx.save_for_backward(x)
        ctx.dim = dim
        return aten.prod.dim_int(x, dim, True)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        zeros = (x == 0).long().sum(ctx.dim, True)
        there = torch.where(x == 0, 1, x)
        others = cotangent * aten.prod.dim_int(there, ctx.dim, True)
        alone = torch.where(x == 0, others, 0)
        return torch.where(zeros == 0, others / there, torch.where(zeros == 1, alone, 0)), None


class _Deviation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: Sequence[int], correction: float) -> Any:
        out = aten.std.correction(x, dims, correction=correction, keepdim=True)
        ctx.save_for_backward(x, out)
        ctx.dims, ctx.correction = dims, correction
        return out

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        x, out = ctx.saved_tensors
        count = math.prod(x.shape[dim] for dim in ctx.dims)
        free = torch.scalar_tensor(count, dtype=x.dtype) - ctx.correction
        off = x - x.sum(ctx.dims, True) / count
        slope = torch.where(out == 0, 0, cotangent / out)
        return slope * off / free, None, None


def _from_the_end(x: Tensor, dim: int) -> Tensor:
    return x.flip(dim).cumsum(dim).flip(dim)


def _apply(function: Any, *arguments: Any) -> Tensor:
    out: Tensor = function.apply(*arguments)
    return out


def _cumulative(operator: Any, function: Any, *, turns: bool = False) -> Callable[..., Any]:
    """Where something is asked, or torch's derivative has a turn for each element of `dim`."""

    def form(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Any:
        if not x.dim() or not (_asks(x) or (turns and _is_symbol(x, dim))):
            return operator(x, dim, dtype=dtype)
        return _apply(function, x if dtype is None else x.to(dtype), dim % x.dim())

    return form


def _prod(x: Tensor, *, dtype: torch.dtype | None = None) -> Any:
    if not _asks(x):
        return aten.prod.default(x, dtype=dtype)
    x = x if dtype is None else x.to(dtype)
    return _apply(_Product, x.reshape(math.prod(x.shape)), 0).squeeze(0)


def _prod_dim(
    x: Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    if not _asks(x) or not x.dim():
        return aten.prod.dim_int(x, dim, keepdim, dtype=dtype)
    out = _apply(_Product, x if dtype is None else x.to(dtype), dim % x.dim())
    return out if keepdim else out.squeeze(dim)


def _std(
    x: Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> Any:
    if not _asks(x):
        return aten.std.correction(x, dim, correction=correction, keepdim=keepdim)
    dims = [each % x.dim() for each in (dim or range(x.dim()))]
    out = _apply(_Deviation, x, dims, 1 if correction is None else correction)
    return out if keepdim else out.squeeze(dims)


def _is_symbol(x: Tensor, dim: int) -> bool:
    return x.is_floating_point() and isinstance(x.shape[dim], torch.SymInt)


def _asks(x: Tensor) -> bool:
    real = x.is_floating_point()  # integers have no derivative, and complex numbers another
    return real and any(map(may_be_none, x.shape))


FOLDS: dict[Any, Callable[..., Any]] = {
    aten.cumsum.default: _cumulative(aten.cumsum.default, _CumulativeSum),
    aten.cumprod.default: _cumulative(aten.cumprod.default, _CumulativeProduct, turns=True),
    aten.prod.default: _prod,
    aten.prod.dim_int: _prod_dim,
    aten.std.correction: _std,
}
"""What the gradient program computes instead of such an operator."""
