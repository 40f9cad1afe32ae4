"""Scores of queries and keys, which of them count, and the sum of values by their softmax."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.exporter.shims._dtypes import wide
from fuseport.exporter.shims._sizes import always
from fuseport.ops.packed import Packed

__all__ = ["Options", "Places", "attend", "packed_places", "places", "slopes_of"]

Window = tuple[int, int]
Masks = Tensor | tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class Options:
    """What attention is asked to be.

    Attributes:
        scale: of the scores.
        window: how many keys before a query's place, and after it, it sees; -1 for all.
        dropout: the part of the weights that is left out at random.
        bias: added to the scores, broadcast over (b, h, l, m), or None.
        bias_is_scaled: whether it is added before the scale.
        slopes: (h,) or (b, h), of the distance that is subtracted from the scores, or None.
        sink: (h,), a score of each head that takes weight and has no value, or None.
    """

    scale: float
    window: Window
    dropout: float = 0.0
    bias: Tensor | None = None
    bias_is_scaled: bool = False
    slopes: Tensor | None = None
    sink: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether scores are what they are, but for those of keys after a query's place."""
        changed = (self.bias, self.slopes, self.sink)
        return self.window[0] < 0 and self.window[1] <= 0 and all(t is None for t in changed)


@dataclass(frozen=True)
class Places:
    """Where queries and keys are, of what broadcasts over (b, h, l, m).

    Attributes:
        behind: how many steps a key is before a query, integers.
        allowed: which pairs there are; None for all.
        blank: whether a query that sees no key has zeros; else it sees all.
    """

    behind: Tensor
    allowed: Tensor | None
    blank: bool


def slopes_of(heads: int) -> Tensor:
    """(h,) of 2^(-8·i/n), i of 1 to n, the power of 2 below the heads, and of those between."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2.0 ** (-8.0 * i / power) for i in range(1, power + 1)]
    slopes += [2.0 ** (-4.0 * i / power) for i in range(1, 2 * (heads - power), 2)]
    return torch.tensor(slopes)


def places(q: Tensor, k: Tensor, kind: str, masks: Masks, from_end: bool) -> Places:
    """Of sequences of one length, padded where the mask says so.

    Args:
        q: (b, h, l, d).
        k: (b, g, m, d).
        kind: of mask, with "padding" or "arbitrary" in it, or neither.
        masks: True where nothing is seen. For padding (b, 1, 1, l) for both, or a pair with that of
            keys, (b, 1, 1, m); else what broadcasts over (b, h, l, m), or None.
        from_end: whether the last of queries and keys are at one place, and not the first.
    """
    length, seen = q.shape[2], k.shape[2]
    step = torch.arange(length, device=q.device)[:, None]
    behind = step - torch.arange(seen, device=q.device)
    if "padding" not in kind:
        if from_end and not always(length == seen):
            behind = behind + (seen - length)
        allowed = ~masks if isinstance(masks, Tensor) and kind == "arbitrary" else None
        return Places(behind, allowed, kind != "arbitrary")
    rows, columns = (masks, masks) if isinstance(masks, Tensor) else masks or (None, None)
    if rows is None or columns is None:
        raise ValueError(f"transformer_engine: a mask of {kind} needs attention_mask or cu_seqlens")
    kept, present = ~rows.reshape(-1, 1, length, 1), ~columns.reshape(-1, 1, 1, seen)
    if from_end:
        ends = present.sum(-1, keepdim=True) - kept.sum(-2, keepdim=True)
        behind = behind + ends
    return Places(behind, kept & present, True)


def packed_places(
    q: Tensor,
    k: Tensor,
    of_q: tuple[Tensor, Tensor | None],
    of_k: tuple[Tensor, Tensor | None],
    from_end: bool,
) -> Places:
    """Of sequences that follow one another in one row.

    Args:
        q: (n, h, d).
        k: (m, g, d).
        of_q: (b + 1,), the sum of the lengths before each sequence, and of all; and the same with
            the padding after each of them, where there is some, or None.
        of_k: as of_q.
        from_end: whether the last of a sequence's queries and keys are at one place.
    """
    (rows, inside), (columns, present) = _packed(of_q, q.shape[0]), _packed(of_k, k.shape[0])
    behind = rows.from_start[:, None] - columns.from_start
    if from_end:
        ends = of_k[0].diff() - of_q[0].diff()
        behind = behind + ends.long()[rows.sequence][:, None]
    together = rows.sequence[:, None] == columns.sequence
    return Places(behind, together & inside[:, None] & present, True)


def _packed(starts: tuple[Tensor, Tensor | None], steps: int) -> tuple[Packed, Tensor]:
    """Where steps are, and which of them are of a sequence and not padding."""
    lengths, padded = starts
    where = Packed.of(lengths if padded is None else padded, steps)
    inside = where.is_inside
    if padded is not None:
        inside = inside & (where.from_start < lengths.diff()[where.sequence])
    return where, inside


def attend(q: Tensor, k: Tensor, v: Tensor, where: Places | None, options: Options) -> Tensor:
    """Computed in float32, or float64 for a float64 q, and rounded once.

    Args:
        q: (b, h, l, d), of a floating dtype.
        k: (b, g, m, d), g a divisor of h.
        v: (b, g, m, e).
        where: places; None where all is seen, or, with a window that ends at a query's place, what
            is not after it, of as many queries as keys.
        options: what it is to be.

    Returns:
        (b, h, l, e).
    """
    k, v = _for_all_heads(q, k), _for_all_heads(q, v)
    if where is None:
        causal = options.window[1] == 0
        return F.scaled_dot_product_attention(
            q, k, v, dropout_p=options.dropout, is_causal=causal, scale=options.scale
        )
    real = wide(q)
    scores = torch.matmul(q.to(real), k.to(real).mT)
    if options.bias is not None and options.bias_is_scaled:
        scores = (scores + options.bias.to(real)) * options.scale
    else:
        scores = scores * options.scale
        if options.bias is not None:
            scores = scores + options.bias.to(real)
    if options.slopes is not None:
        distance = where.behind.abs().to(real)
        scores = scores - options.slopes.to(scores)[..., None, None] * distance
    allowed = _seen(where, options.window)
    if allowed is not None:
        # A finite number: the softmax of a row that is empty has a gradient, which is then 0.
        scores = scores.masked_fill(~allowed, torch.finfo(real).min)
    weights = _softmax(scores, options.sink)
    if allowed is not None and where.blank:
        weights = weights.masked_fill(~allowed, 0.0)
    if options.dropout > 0.0:
        weights = F.dropout(weights, options.dropout)
    return torch.matmul(weights, v.to(real)).to(q.dtype)


def _seen(where: Places, window: Window) -> Tensor | None:
    back, ahead = window
    allowed = where.allowed
    for is_near in (
        None if back < 0 else where.behind <= back,
        None if ahead < 0 else where.behind >= -ahead,
    ):
        if is_near is not None:
            allowed = is_near if allowed is None else allowed & is_near
    return allowed


def _softmax(scores: Tensor, sink: Tensor | None) -> Tensor:
    if sink is None:
        return scores.softmax(-1)
    column = sink.to(scores).reshape(-1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


def _for_all_heads(q: Tensor, kept: Tensor) -> Tensor:
    """(b, g, m, d) → (b, h, m, d), each head of keys for as many of queries in a row."""
    shared = q.shape[1] // kept.shape[1]
    return kept if shared == 1 else kept.repeat_interleave(shared, 1)
