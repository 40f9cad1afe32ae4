"""Rows of several tensors, chosen by index, and added at an index."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["index_select_cat", "scaled_index_add"]


def index_select_cat(sources: Sequence[Tensor], indices: Sequence[Tensor]) -> Tensor:
    """Rows of each of (n, d) by its (k,), integers, flat and one after another: (Σ k·d,)."""
    pairs = zip(sources, indices, strict=True)
    return torch.cat([rows.index_select(0, index).flatten() for rows, index in pairs])


def scaled_index_add(
    input: Tensor,
    index: Tensor,
    source: Tensor,
    scaling: Tensor | None = None,
    alpha: float = 1.0,
) -> Tensor:
    """`input` with alpha · scaling · source added to its entries at `index`, in place.

    Args:
        input: (b, m, d), overwritten and returned.
        index: (k,), integers.
        source: (k, m, d).
        scaling: (d,), or None for ones.
        alpha: a number.
    """
    added = source if scaling is None else scaling * source
    return input.index_add_(0, index, added.to(input.dtype), alpha=alpha)
