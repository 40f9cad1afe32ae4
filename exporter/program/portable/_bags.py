"""Bags of embeddings, and bilinear layers, by operators that every format has derivatives of."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["BAGS", "bilinear"]

aten = torch.ops.aten

_SUM, _MEAN = 0, 1  # torch's numbers; the other is the maximum


def _embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[Tensor, ...]:
    """As `aten.embedding_bag`: rows (n, d) at `indices` (m,), in bags that begin at `offsets`.

    What torch gives besides is of its own use: it is something of the shape of bags here.
    """
    count = offsets.shape[0] - int(include_last_offset)
    starts = offsets[:count].long()
    begun = torch.zeros(indices.shape[0] + 1, dtype=torch.int64, device=indices.device)
    begun = begun.index_add(0, starts, torch.ones_like(starts))  # several, where a bag is empty
    bags = begun.cumsum(0)[: indices.shape[0]] - 1
    rows = torch.nn.functional.embedding(indices, weight)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(1)
    kept = torch.ones_like(indices, dtype=torch.bool)
    if padding_idx is not None and padding_idx >= 0:
        kept = indices != padding_idx
    sizes = torch.zeros(count, dtype=torch.int64, device=indices.device)
    sizes = sizes.index_add(0, bags, kept.long()).unsqueeze(1)
    if mode in (_SUM, _MEAN):
        rows = rows.masked_fill(~kept.unsqueeze(1), 0)
        out = rows.new_zeros(count, weight.shape[1]).index_add(0, bags, rows)
        out = out / sizes.clamp(min=1) if mode == _MEAN else out
    else:
        rows = rows.masked_fill(~kept.unsqueeze(1), -torch.inf)
        out = rows.new_full((count, weight.shape[1]), -torch.inf)
        places = bags.unsqueeze(1).expand(rows.shape)
        out = out.scatter_reduce(0, places, rows, "amax").masked_fill(sizes == 0, 0)
    return out, bags, starts, starts


BAGS: dict[Any, Callable[..., Any]] = dict.fromkeys(
    (
        aten.embedding_bag.default,
        aten.embedding_bag.padding_idx,
        aten._embedding_bag.default,
    ),
    _embedding_bag,
)
"""For each operator of a bag of embeddings, what computes the same, and its gradients unless they
are scaled by frequency."""


def bilinear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `aten.bilinear`: (…, i) and (…, j), by (k, i, j), to (…, k)."""
    left = torch.matmul(x.unsqueeze(-2).unsqueeze(-2), weight)  # (…, k, 1, j)
    out = torch.matmul(left, y.unsqueeze(-2).unsqueeze(-1)).squeeze(-1).squeeze(-1)
    return out if bias is None else out + bias
