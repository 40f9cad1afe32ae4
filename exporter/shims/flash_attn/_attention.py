"""Attention over whole sequences, and over sequences that are packed one after another."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.exporter.shims._sizes import always
from fuseport.ops.packed import Packed

__all__ = ["Options", "attend", "attend_packed"]


@dataclass(frozen=True)
class Options:
    """What attention is asked to be.

    Attributes:
        dropout_p: must be 0.
        softmax_scale: of the scores; None for 1/√d.
        causal: whether a query sees no key after it; the last of both are at one place.
        window_size: how many keys before a query's place, and after it, it sees; negative or None
            for all.
        softcap: c of c·tanh(score / c); 0 for none.
        alibi_slopes: (h,) or (b, h), of the distance that is subtracted from the scores, or None.
        return_attn_probs: whether the logarithm of each row's sum is returned too.

    Raises:
        ValueError: dropout_p is above 0.
    """

    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size: tuple[int | None, int | None]
    softcap: float
    alibi_slopes: Tensor | None
    return_attn_probs: bool

    def __post_init__(self) -> None:
        if self.dropout_p > 0.0:
            raise ValueError(
                f"fuseport's stand-in for flash_attn has no dropout, and dropout_p is "
                f"{self.dropout_p}: call the model in eval mode"
            )

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """How far a query sees back and ahead; None for to the end."""
        back, ahead = (None if n is None or n < 0 else n for n in self.window_size)
        return back, 0 if self.causal else ahead

    @property
    def is_plain(self) -> bool:
        """Whether all pairs have their score as it is, but for those that `causal` rules out."""
        windowed = self.reach != (None, 0 if self.causal else None)
        capped = self.softcap > 0.0
        return not (windowed or capped or self.return_attn_probs) and self.alibi_slopes is None


def attend(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Any:
    """Attention within each sequence of a batch.

    Args:
        q: (b, l, h, d), of a floating dtype.
        k: (b, m, g, d), g a divisor of h.
        v: (b, m, g, e).
        options: what it is to be.

    Returns:
        (b, l, h, e), contiguous; zeros in rows that see no key. With `return_attn_probs`, after it
        the logarithm of each row's sum, (b, h, l), and an empty tensor.

    Raises:
        ValueError: shapes do not fit.
    """
    _check(q, k, v, 4)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    length, seen = q.shape[2], k.shape[2]
    if options.is_plain and (not options.causal or always(length == seen)):
        k, v = _for_all_heads(q, k), _for_all_heads(q, v)
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=options.causal, scale=options.softmax_scale
        )
        return y.transpose(1, 2).contiguous()
    after = torch.arange(seen, device=q.device) - seen
    behind = (torch.arange(length, device=q.device) - length)[:, None] - after
    slopes = options.alibi_slopes
    if slopes is not None:
        slopes = slopes[..., None, None]
    out, sums = _rows(q, k, v, behind, None, slopes, options)
    return _returned(out.transpose(1, 2).contiguous(), sums, options)


def attend_packed(
    q: Tensor, k: Tensor, v: Tensor, of_q: Tensor, of_k: Tensor, options: Options
) -> Any:
    """Attention within sequences that follow one another in one row.

    All pairs of steps have a score, and those of two sequences are ruled out.

    Args:
        q: (n, h, d), of a floating dtype.
        k: (m, g, d), g a divisor of h.
        v: (m, g, e).
        of_q: (b + 1,), where each sequence begins in q, and the end of the last.
        of_k: (b + 1,), the same in k and v.
        options: what it is to be.

    Returns:
        (n, h, e), contiguous; zeros in rows that see no key, and from the end of the last sequence
        on. With `return_attn_probs`, after it the logarithm of each row's sum, (h, n), and an empty
        tensor.

    Raises:
        ValueError: shapes do not fit.
    """
    _check(q, k, v, 3)
    rows, columns = Packed.of(of_q, q.shape[0]), Packed.of(of_k, k.shape[0])
    behind = columns.to_go - rows.to_go[:, None]
    together = rows.sequence[:, None] == columns.sequence
    together = together & rows.is_inside[:, None] & columns.is_inside
    slopes = options.alibi_slopes
    if slopes is not None:
        slopes = slopes[rows.sequence].T if slopes.dim() == 2 else slopes[:, None]
        slopes = slopes[..., None]
    # A batch of one: ONNX Runtime 1.31 dies of a product of (n, h, d) where it fuses the transposes
    # with it and n is 0, as it is where a mask keeps nothing.
    q, k, v = (t[None].transpose(1, 2) for t in (q, k, v))
    out, sums = _rows(q, k, v, behind, together, slopes, options)
    return _returned(out[0].transpose(0, 1).contiguous(), sums[0], options)


def _rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    behind: Tensor,
    allowed: Tensor | None,
    slopes: Tensor | None,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """Of (…, h, l, d), each row's result and the logarithm of its sum, infinite if it is empty.

    It is computed in float32, or float64 for a float64 `q`, and rounded once; the sums are float32
    or float64, and no gradient goes through them.

    Args:
        q: (…, h, l, d).
        k: (…, g, m, d).
        v: (…, g, m, e).
        behind: (l, m), how many steps a key is before a query, integers.
        allowed: (l, m), which pairs there are; None for all.
        slopes: of the distance, broadcast over (…, h, l, m), or None.
        options: of them the scale, the reach and the softcap.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    k, v = _for_all_heads(q, k), _for_all_heads(q, v)
    scale = q.shape[-1] ** -0.5 if options.softmax_scale is None else options.softmax_scale
    scores = torch.matmul(q.to(wide) * scale, k.to(wide).mT)
    if options.softcap > 0.0:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if slopes is not None:
        scores = scores - slopes.to(wide) * behind.abs().to(wide)
    back, ahead = options.reach
    for is_near in (
        None if back is None else behind <= back,
        None if ahead is None else behind >= -ahead,
    ):
        if is_near is not None:
            allowed = is_near if allowed is None else allowed & is_near
    if allowed is not None:
        # A finite number: the softmax of a row that is empty has a gradient, which is then 0.
        scores = scores.masked_fill(~allowed, torch.finfo(wide).min)
    weights = scores.softmax(-1)
    if allowed is not None:
        weights = weights.masked_fill(~allowed, 0.0)
    out = torch.matmul(weights, v.to(wide)).to(q.dtype)
    sums = scores.detach()
    if options.return_attn_probs:
        sums = sums.logsumexp(-1)
        if allowed is not None:
            sums = sums.masked_fill(~allowed.any(-1), torch.inf)
    return out, sums


def _returned(out: Tensor, sums: Tensor, options: Options) -> Any:
    return (out, sums, out.new_zeros(0)) if options.return_attn_probs else out


def _for_all_heads(q: Tensor, kept: Tensor) -> Tensor:
    """(…, g, m, d) → (…, h, m, d), each head of keys for as many of queries in a row."""
    shared = q.shape[-3] // kept.shape[-3]
    return kept if shared == 1 else kept.repeat_interleave(shared, -3)


def _check(q: Tensor, k: Tensor, v: Tensor, dimensions: int) -> None:
    shapes = f"q is {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == dimensions:
        raise ValueError(f"flash_attn: q, k and v have {dimensions} dimensions; {shapes}")
    if q.shape[-2] % k.shape[-2] or k.shape[-2] != v.shape[-2] or q.shape[-1] != k.shape[-1]:
        raise ValueError(f"flash_attn: heads or channels do not fit each other: {shapes}")
