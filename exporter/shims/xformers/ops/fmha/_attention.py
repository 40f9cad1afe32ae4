"""Attention with a bias, within one block of queries and keys or within several."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from fuseport.exporter.shims._sizes import always
from fuseport.exporter.shims.flash_attn._attention import Options, attend_packed
from fuseport.exporter.shims.flash_attn._attention import attend as attend_flash

from .attn_bias import (
    AttentionBias,
    BlockDiagonalMask,
    LowerTriangularMaskWithTensorBias,
    Reach,
)

__all__ = ["attend"]


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | AttentionBias | None, p: float, scale: Any
) -> Tensor:
    """See `memory_efficient_attention`."""
    if p > 0.0:
        raise ValueError(
            f"fuseport's stand-in for xformers has no dropout, and p is {p}, which xformers applies"
            " in eval mode, too: make the model with none in its attention"
        )
    _check(q, k, v)
    if q.dim() == 3:
        of_one = bias[:, None] if isinstance(bias, Tensor) else bias
        q, k, v = (t[:, :, None] for t in (q, k, v))
        return attend(q, k, v, of_one, p, scale)[:, :, 0]
    if q.dim() == 5:
        groups = q.shape[2:4]
        flat = bias.flatten(1, 2) if isinstance(bias, Tensor) and bias.dim() == 5 else bias
        q, k, v = (t.flatten(2, 3) for t in (q, k, v))
        whole: Tensor = attend(q, k, v, flat, p, scale).unflatten(2, groups)
        return whole
    if isinstance(bias, BlockDiagonalMask):
        return _blocks(q, k, v, bias, scale)
    if isinstance(bias, LowerTriangularMaskWithTensorBias):
        added = bias._bias
        behind = _behind(q.shape[1], k.shape[1], q.device)
        lowest = torch.finfo(added.dtype).min
        return _biased(q, k, v, added.masked_fill(behind < 0, lowest), scale)
    if isinstance(bias, Tensor):
        return _biased(q, k, v, bias, scale)
    if bias is None:
        return _within(q, k, v, Reach(None, None, False), scale)
    reach = bias.reach
    if reach is None:
        raise NotImplementedError(
            f"fuseport's stand-in for xformers has no attention with a {type(bias).__name__}"
        )
    return _within(q, k, v, reach, scale)


def _blocks(q: Tensor, k: Tensor, v: Tensor, bias: BlockDiagonalMask, scale: Any) -> Tensor:
    """Block by block; neighbours of the same lengths are a batch."""
    if any(t.shape[0] != 1 for t in (q, k, v)):
        raise ValueError(
            f"xformers: blocks are in a batch of 1; query is {tuple(q.shape)}, key {tuple(k.shape)}"
        )
    lengths = [*bias.q_seqinfo.lengths, *bias.k_seqinfo.lengths]
    if any(isinstance(n, torch.SymInt) and free_unbacked_symbols(n) for n in lengths):
        return _packed(q, k, v, bias, scale)
    counts, of_q, of_k = bias.groups()
    qs, ks, vs = (
        t.split([count * length for count, length in zip(counts, lengths, strict=True)], 1)
        for t, lengths in ((q, of_q), (k, of_k), (v, of_k))
    )
    parts = []
    for count, length, seen, *one in zip(counts, of_q, of_k, qs, ks, vs, strict=True):
        q = one[0].reshape(count, length, *q.shape[2:])
        k = one[1].reshape(count, seen, *k.shape[2:])
        v = one[2].reshape(count, seen, *v.shape[2:])
        parts.append(_within(q, k, v, bias.reach, scale).flatten(0, 1)[None])
    return torch.cat(parts, 1)


def _packed(q: Tensor, k: Tensor, v: Tensor, bias: BlockDiagonalMask, scale: Any) -> Tensor:
    """All pairs of steps at once, of blocks whose lengths are known when the program runs."""
    reach, are_alike = bias.reach, bias.q_seqinfo is bias.k_seqinfo
    if not (reach.from_end or are_alike or reach == (None, None, False)):
        raise NotImplementedError(
            f"fuseport's stand-in for xformers has a {type(bias).__name__} of lengths that are "
            "computed only where those of keys are those of queries"
        )
    of_q, of_k = bias.q_seqinfo.seqstart, bias.k_seqinfo.seqstart
    out: Tensor = attend_packed(q[0], k[0], v[0], of_q, of_k, _options(reach, scale))
    return out[None]


def _within(q: Tensor, k: Tensor, v: Tensor, reach: Reach, scale: Any) -> Tensor:
    """(b, l, h, d) to (b, m, h, d), where places count from the first or the last of both."""
    if reach.from_end or reach == (None, None, False) or always(q.shape[1] == k.shape[1]):
        found: Tensor = attend_flash(q, k, v, _options(reach, scale))
        return found
    behind = _behind(q.shape[1], k.shape[1], q.device)
    hidden = behind < -(reach.ahead or 0)
    if reach.back is not None:
        hidden = hidden | (behind > reach.back)
    added = q.new_zeros(()).masked_fill(hidden, torch.finfo(q.dtype).min)
    return _biased(q, k, v, added, scale)


def _options(reach: Reach, scale: Any) -> Options:
    back = -1 if reach.back is None else reach.back
    causal = reach.ahead == 0
    ahead = -1 if causal or reach.ahead is None else reach.ahead
    return Options(0.0, scale, causal, (back, ahead), 0.0, None, False)


def _behind(length: int, seen: int, device: torch.device) -> Tensor:
    """(l, m): how many places a key is before a query."""
    return torch.arange(length, device=device)[:, None] - torch.arange(seen, device=device)


def _biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: Any) -> Tensor:
    if not bias.is_floating_point():
        raise ValueError(
            f"xformers: attn_bias is {bias.dtype}, and is added to the scores: it is of query's "
            "dtype, -inf where there is to be no attention"
        )
    if bias.dim() == 3:
        bias = bias.unflatten(0, (-1, q.shape[2]))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype), scale=scale)
    return y.transpose(1, 2).contiguous()


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    shapes = f"query is {tuple(q.shape)}, key {tuple(k.shape)}, value {tuple(v.shape)}"
    if q.dim() not in (3, 4, 5) or not q.dim() == k.dim() == v.dim():
        raise ValueError(f"xformers: query, key and value have 3, 4 or 5 dimensions; {shapes}")
    if q.shape[2:] != k.shape[2:] or k.shape[2:-1] != v.shape[2:-1]:
        raise ValueError(f"xformers: heads or channels do not fit each other: {shapes}")
