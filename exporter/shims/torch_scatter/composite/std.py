"""Standard deviations."""

import torch
from torch import Tensor

from .._scatter import scatter_sum
from ..utils import broadcast

__all__ = ["scatter_std"]


def scatter_std(
    src: Tensor,
    index: Tensor,
    dim: int = -1,
    out: Tensor | None = None,
    dim_size: int | None = None,
    unbiased: bool = True,
) -> Tensor:
    """Of src, (…, n, …), √(Σ (x - mean)² / (count + 1e-6)) of each group, (…, dim_size, …).

    Args:
        src: of a floating dtype.
        index: as in `scatter`.
        dim: as in `scatter`.
        out: the squares are added to it, which changes it; or None.
        dim_size: as in `scatter`.
        unbiased: whether the count is one less, 1 at least.
    """
    index = broadcast(index, src, dim)
    total = scatter_sum(src, index, dim, dim_size=dim_size if out is None else out.shape[dim])
    count = torch.zeros_like(total).scatter_add(dim, index, torch.ones_like(src)).clamp(min=1)
    count = count.detach()
    squares = (src - (total / count).gather(dim, index)).square()
    found = scatter_sum(squares, index, dim, out, total.shape[dim])
    if unbiased:
        count = (count - 1).clamp(min=1)
    return (found / (count + 1e-6)).sqrt()
