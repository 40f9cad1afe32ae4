"""Reductions along one dimension by an index of groups.

All take src, (…, n, …) with n at `dim`; index, of its shape, or one that `broadcast` takes; `out`,
which the result is added to and written to, or None; and `dim_size`, the number of groups, None for
the largest index and one. They return (…, dim_size, …).
"""

from typing import Any

import torch
from torch import Tensor

from .utils import broadcast

__all__ = [
    "scatter",
    "scatter_add",
    "scatter_max",
    "scatter_mean",
    "scatter_min",
    "scatter_mul",
    "scatter_sum",
]


def scatter_sum(
    src: Tensor,
    index: Tensor,
    dim: int = -1,
    out: Tensor | None = None,
    dim_size: int | None = None,
) -> Tensor:
    """The sum of each group; 0 where there is nothing in it."""
    index = broadcast(index, src, dim)
    if out is not None:
        return out.scatter_add_(dim, index, src)
    return _filled(0, src, index, dim, dim_size).scatter_add(dim, index, src)


scatter_add = scatter_sum


def scatter_mul(
    src: Tensor,
    index: Tensor,
    dim: int = -1,
    out: Tensor | None = None,
    dim_size: int | None = None,
) -> Tensor:
    """The product of each group; 1 where there is nothing in it.

    Raises:
        NotImplementedError: out is given.
    """
    _refuse(out, "scatter_mul")
    index = broadcast(index, src, dim)
    ones = _filled(1, src, index, dim, dim_size)
    return ones.scatter_reduce(dim, index, src, "prod", include_self=True)


def scatter_mean(
    src: Tensor,
    index: Tensor,
    dim: int = -1,
    out: Tensor | None = None,
    dim_size: int | None = None,
) -> Tensor:
    """The mean of each group, rounded down of integers; 0 where there is nothing in it."""
    index = broadcast(index, src, dim)
    total = scatter_sum(src, index, dim, out, dim_size)
    count = torch.zeros_like(total).scatter_add(dim, index, torch.ones_like(src)).clamp(min=1)
    mode = None if total.is_floating_point() else "floor"
    mean = torch.div(total, count.detach(), rounding_mode=mode)
    return mean if out is None else out.copy_(mean)


def scatter_min(
    src: Tensor,
    index: Tensor,
    dim: int = -1,
    out: Tensor | None = None,
    dim_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`scatter_max` of what is smallest."""
    return _extreme(src, index, dim, out, dim_size, "amin")


def scatter_max(
    src: Tensor,
    index: Tensor,
    dim: int = -1,
    out: Tensor | None = None,
    dim_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The largest value of each group, and its place in src, int64; 0 and n where there is none.

    Raises:
        NotImplementedError: out is given.
    """
    return _extreme(src, index, dim, out, dim_size, "amax")


def scatter(
    src: Tensor,
    index: Tensor,
    dim: int = -1,
    out: Tensor | None = None,
    dim_size: int | None = None,
    reduce: str = "sum",
) -> Tensor:
    """That of these that `reduce` names: sum, add, mul, mean, min or max, without places.

    Raises:
        ValueError: it names another.
    """
    if reduce in ("min", "max"):
        function = scatter_min if reduce == "min" else scatter_max
        return function(src, index, dim, out, dim_size)[0]
    known = {"sum": scatter_sum, "add": scatter_sum, "mul": scatter_mul, "mean": scatter_mean}
    if reduce not in known:
        raise ValueError(f"torch_scatter: there is no reduction {reduce!r}")
    return known[reduce](src, index, dim, out, dim_size)


def _extreme(
    src: Tensor, index: Tensor, dim: int, out: Tensor | None, dim_size: Any, reduce: str
) -> tuple[Tensor, Tensor]:
    _refuse(out, "scatter_min" if reduce == "amin" else "scatter_max")
    index, dim = broadcast(index, src, dim), dim % src.dim()
    info = torch.finfo if src.is_floating_point() else torch.iinfo
    limit = info(src.dtype).max if reduce == "amin" else info(src.dtype).min
    values = src.detach()
    found = _filled(limit, values, index, dim, dim_size)
    found = found.scatter_reduce(dim, index, values, reduce, include_self=True)
    behind = (None,) * (src.dim() - dim - 1)
    step = torch.arange(src.shape[dim], device=src.device)[(..., *behind)].expand(src.shape)
    # What is no more than the limit is not found, in the package either.
    is_found = (values == found.gather(dim, index)) & (values != limit)
    last = torch.scalar_tensor(src.shape[dim], dtype=torch.int64, device=src.device)
    place = torch.where(is_found, step, last)
    places = (torch.zeros_like(found, dtype=torch.int64) + last).scatter_reduce(
        dim, index, place, "amin", include_self=True
    )
    nothing = src.new_zeros((*src.shape[:dim], 1, *src.shape[dim + 1 :]))
    return torch.cat([src, nothing], dim).gather(dim, places), places


def _filled(value: float, src: Tensor, index: Tensor, dim: int, dim_size: Any) -> Tensor:
    shape: list[Any] = list(src.shape)
    shape[dim] = groups(index) if dim_size is None else dim_size
    return src.new_full(shape, value)


def groups(index: Tensor) -> Any:
    """The largest index and one; 0 of none."""
    if type(index.numel()) is int and index.numel() == 0:
        return 0
    return sized(index.max() + 1)


def sized(value: Tensor) -> Any:
    """A tensor of one integer as a size, which a program computes."""
    size = value.item()  # not int(value), which asks for a number while a program is captured
    torch._check(size >= 0)
    return size


def _refuse(out: Tensor | None, name: str) -> None:
    if out is not None:
        raise NotImplementedError(
            f"torch_scatter's {name} was called with out, which fuseport's stand-in does not write "
            "to: call it with dim_size=out.size(dim), and combine the two"
        )
