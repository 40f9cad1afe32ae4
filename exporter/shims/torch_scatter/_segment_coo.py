"""Reductions of sorted groups: index is (…, n), and the last of its dimensions is reduced in src.

Its other dimensions are those of src, or 1. What functions take and return is as in `scatter`.
"""

from typing import Any

from torch import Tensor

from ._scatter import scatter, scatter_max, scatter_mean, scatter_min, scatter_sum

__all__ = [
    "gather_coo",
    "segment_add_coo",
    "segment_coo",
    "segment_max_coo",
    "segment_mean_coo",
    "segment_min_coo",
    "segment_sum_coo",
]


def segment_sum_coo(
    src: Tensor, index: Tensor, out: Tensor | None = None, dim_size: int | None = None
) -> Tensor:
    """The sum of each group."""
    return scatter_sum(*_along(src, index), out, dim_size)


segment_add_coo = segment_sum_coo


def segment_mean_coo(
    src: Tensor, index: Tensor, out: Tensor | None = None, dim_size: int | None = None
) -> Tensor:
    """The mean of each group."""
    return scatter_mean(*_along(src, index), out, dim_size)


def segment_min_coo(
    src: Tensor, index: Tensor, out: Tensor | None = None, dim_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """The smallest value of each group, and its place."""
    return scatter_min(*_along(src, index), out, dim_size)


def segment_max_coo(
    src: Tensor, index: Tensor, out: Tensor | None = None, dim_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """The largest value of each group, and its place."""
    return scatter_max(*_along(src, index), out, dim_size)


def segment_coo(
    src: Tensor,
    index: Tensor,
    out: Tensor | None = None,
    dim_size: int | None = None,
    reduce: str = "sum",
) -> Tensor:
    """That of these that `reduce` names, as `scatter`."""
    return scatter(*_along(src, index), out, dim_size, reduce)


def gather_coo(src: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
    """Of src, (…, groups, …), that of its group for each of index, (…, n): (…, n, …)."""
    dim = index.dim() - 1
    index = index.expand(*src.shape[:dim], -1)[(..., *(None,) * (src.dim() - dim - 1))]
    found = src.gather(dim, index.expand(*index.shape[: dim + 1], *src.shape[dim + 1 :]))
    return found if out is None else out.copy_(found)


def _along(src: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Any]:
    dim = index.dim() - 1
    return src, index.expand(src.shape[: dim + 1]), dim
