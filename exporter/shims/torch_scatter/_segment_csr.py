"""Reductions of groups that follow one another: indptr is (…, groups + 1), where each begins.

The last entry is the end of the last group. indptr's last dimension is reduced in src, and its
other dimensions are those of src, or 1. What is in no group has no effect.
"""

import torch
from torch import Tensor

from ._scatter import scatter, scatter_max, scatter_min, sized
from ._segment_coo import gather_coo

__all__ = [
    "gather_csr",
    "segment_add_csr",
    "segment_csr",
    "segment_max_csr",
    "segment_mean_csr",
    "segment_min_csr",
    "segment_sum_csr",
]


def segment_csr(
    src: Tensor, indptr: Tensor, out: Tensor | None = None, reduce: str = "sum"
) -> Tensor:
    """That of the functions below that `reduce` names, without places: (…, groups, …).

    Raises:
        ValueError: it names another.
    """
    return _of_groups(scatter(*_grouped(src, indptr), reduce), indptr, out)


def segment_sum_csr(src: Tensor, indptr: Tensor, out: Tensor | None = None) -> Tensor:
    """The sum of each group; 0 of none."""
    return segment_csr(src, indptr, out, "sum")


segment_add_csr = segment_sum_csr


def segment_mean_csr(src: Tensor, indptr: Tensor, out: Tensor | None = None) -> Tensor:
    """The mean of each group; 0 of none."""
    return segment_csr(src, indptr, out, "mean")


def segment_min_csr(
    src: Tensor, indptr: Tensor, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The smallest value of each group, and its place in src; 0 and n where there is none."""
    found, places = scatter_min(*_grouped(src, indptr))
    return _of_groups(found, indptr, out), _of_groups(places, indptr, None)


def segment_max_csr(
    src: Tensor, indptr: Tensor, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The largest value of each group, and its place in src; 0 and n where there is none."""
    found, places = scatter_max(*_grouped(src, indptr))
    return _of_groups(found, indptr, out), _of_groups(places, indptr, None)


def gather_csr(src: Tensor, indptr: Tensor, out: Tensor | None = None) -> Tensor:
    """Of src, (…, groups, …), that of its group for each place: (…, n, …), n the last of indptr.

    With `out`, n is its, and no size is computed of values.
    """
    dim = indptr.dim() - 1
    n = sized(indptr.flatten()[-1]) if out is None else out.shape[dim]
    last = src.shape[dim] - 1
    return gather_coo(src, _groups(indptr, n).clamp(max=last), out)


def _grouped(src: Tensor, indptr: Tensor) -> tuple[Tensor, Tensor, int, None, int]:
    """What `scatter` takes; there is one group more, of what is in none."""
    dim = indptr.dim() - 1
    index = _groups(indptr, src.shape[dim]).expand(src.shape[: dim + 1])
    return src, index, dim, None, indptr.shape[-1]


def _groups(indptr: Tensor, n: int) -> Tensor:
    """(…, n): which group each place is in; as many as there are where it is in none."""
    step = torch.arange(n, device=indptr.device)[:, None]
    passed = (step >= indptr[..., None, 1:]).sum(-1)
    return torch.where(step[:, 0] < indptr[..., :1], indptr.shape[-1] - 1, passed)


def _of_groups(found: Tensor, indptr: Tensor, out: Tensor | None) -> Tensor:
    found = found.narrow(indptr.dim() - 1, 0, indptr.shape[-1] - 1)
    return found if out is None else out.copy_(found)
