"""Neighborhood attention, in one step or as scores and what they weight.

Scores of half precision are computed in float32, and rounded once.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._tiles import (
    Axis,
    Tiling,
    contracted,
    gathered,
    hidden,
    hidden_of_window,
    places,
    spread,
    tiled,
    untiled,
)

__all__ = ["attend", "attend_all", "scores_of", "weighted"]

# Queries of a tile along a dimension, by how many dimensions there are: more have more keys that
# not all of them see, fewer have more copies of keys. On one core, these were about the fastest.
_SIZES = {1: 32, 2: 7, 3: 3}


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axes: Sequence[Axis],
    scale: float,
    bias: Tensor | None = None,
    added: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of each query to its window, and to keys that all queries see.

    Args:
        q: (b, L…, h, d), of a floating dtype.
        k: (b, L…, g, d), g a divisor of h.
        v: (b, L…, g, e).
        axes: of each dimension.
        scale: of the scores.
        bias: (h, (2k - 1)…), added to scores by relative places; None for none.
        added: (b, m, g, d) and (b, m, g, e), keys and values beside the windows; None for none.

    Returns:
        (b, L…, h, e), and the logarithm of each query's sum, (b, L…, h), float32 or float64.
    """
    wide = _wide(q)
    tiling = _tiling(axes, q.shape[1:-2], q.device)
    heads = q.shape[-2]
    q, k, v = (_for_all_heads(t, heads).movedim(-2, 1).to(wide) for t in (q, k, v))
    rows = tiled(q * scale, tiling)
    scores = rows @ gathered(k, tiling).mT
    if bias is not None:
        scores = scores + places(tiling, bias.to(wide), of_window=False)
    # A finite number: what fills the last tiles has a gradient, which is then 0.
    scores = scores.masked_fill(hidden(tiling), torch.finfo(wide).min)
    values = gathered(v, tiling)
    if added is None:
        weights = scores.softmax(-1)
        out = weights @ values
    else:
        of_all, kept = (_for_all_heads(t, heads).movedim(-2, 1).to(wide) for t in added)
        beside = rows @ of_all.mT[:, :, None]
        columns = scores.shape[-1]
        scores = torch.cat([scores, beside], -1)
        weights = scores.softmax(-1)
        out = weights[..., :columns] @ values + weights[..., columns:] @ kept[:, :, None]
    sums = untiled(scores.logsumexp(-1, keepdim=True), tiling)[..., 0]
    return untiled(out, tiling).movedim(1, -2), sums.movedim(1, -1)


def attend_all(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of each query to all keys, or if `causal` to those up to its own place.

    Args:
        q: (b, l, h, d), of a floating dtype.
        k: (b, m, g, d), g a divisor of h.
        v: (b, m, g, e).
        causal: see above.
        scale: of the scores.

    Returns:
        (b, l, h, e), and the logarithm of each query's sum, (b, l, h), float32 or float64.
    """
    wide, heads = _wide(q), q.shape[-2]
    q, k, v = (_for_all_heads(t, heads).movedim(-2, 1).to(wide) for t in (q, k, v))
    scores = (q * scale) @ k.mT
    if causal:
        place = torch.arange(q.shape[2], device=q.device)[:, None]
        later = torch.arange(k.shape[2], device=q.device) > place
        scores = scores.masked_fill(later, torch.finfo(wide).min)
    out = scores.softmax(-1) @ v
    return out.transpose(1, 2), scores.logsumexp(-1).transpose(1, 2)


def scores_of(
    q: Tensor,
    k: Tensor,
    axes: Sequence[Axis],
    bias: Tensor | None = None,
    added: Tensor | None = None,
) -> Tensor:
    """The products of each query with the keys of its window.

    Args:
        q: (b, h, L…, d), of a floating dtype.
        k: of q's shape.
        axes: of each dimension.
        bias: (h, (2k - 1)…), added by relative places; None for none.
        added: (b, h, m, d), keys that all queries see; None for none.

    Returns:
        (b, h, L…, Πk), -inf where a key is after its query and that counts; then those of the m
        added keys.
    """
    wide = _wide(q)
    tiling = _tiling(axes, q.shape[2:-1], q.device)
    rows = tiled(q.to(wide), tiling)
    scores = contracted(rows @ gathered(k.to(wide), tiling).mT, tiling)
    if bias is not None:
        scores = scores + places(tiling, bias.to(wide), of_window=True)
    if any(axis.causal for axis in axes):
        scores = scores.masked_fill(hidden_of_window(tiling), -torch.inf)
    if added is not None:
        scores = torch.cat([scores, rows @ added.to(wide).mT[:, :, None]], -1)
    return untiled(scores, tiling).to(q.dtype)


def weighted(
    weights: Tensor, v: Tensor, axes: Sequence[Axis], added: Tensor | None = None
) -> Tensor:
    """The values of each query's window, weighted.

    Args:
        weights: (b, h, L…, Πk), and m more of `added`.
        v: (b, h, L…, d).
        axes: of each dimension.
        added: (b, h, m, d), values that all queries see; None for none.

    Returns:
        (b, h, L…, d).
    """
    wide = _wide(v)
    tiling = _tiling(axes, v.shape[2:-1], v.device)
    rows = tiled(weights.to(wide), tiling)
    columns = rows.shape[-1] if added is None else rows.shape[-1] - added.shape[2]
    own = rows[..., :columns]
    if any(axis.causal for axis in axes):
        own = own.masked_fill(hidden_of_window(tiling), 0.0)
    out = spread(own, tiling) @ gathered(v.to(wide), tiling)
    if added is not None:
        out = out + rows[..., columns:] @ added.to(wide)[:, :, None]
    return untiled(out, tiling).to(v.dtype)


def _tiling(axes: Sequence[Axis], lengths: Sequence[Any], device: torch.device) -> Tiling:
    size = _SIZES[len(axes)]
    if len(axes) > 1:
        size = min(size, *(axis.kernel for axis in axes))
    return Tiling(axes, lengths, size, device)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype


def _for_all_heads(x: Tensor, heads: int) -> Tensor:
    """(…, g, d) → (…, h, d), each head of keys for as many of queries in a row."""
    shared = heads // x.shape[-2]
    return x if shared == 1 else x.repeat_interleave(shared, -2)
