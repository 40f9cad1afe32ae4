"""The rotary embedding in plain torch, forward and backward.

Any device, and any dtype that the op takes; in float64 it is the truth of a verification. Pairs
(a, b) become (a·c - b·s, b·c + a·s); with cotangents (da, db) of these:

    gradients of (a, b) = (da·c + db·s, db·c - da·s)
    dcos = Σ (da·a + db·b)        dsin = Σ (db·a - da·b)

with sums over heads, and over batches that share their angles.
"""

import torch
from torch import Tensor

from fuseport.ops.rms_norm.reference import contiguous
from fuseport.ops.rms_norm.shapes import wide
from fuseport.ops.rotary_embedding.shapes import check, check_cotangent

__all__ = ["rotary_embedding", "rotary_embedding_backward"]

Pairs = tuple[Tensor, Tensor]


def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """out, in x's dtype."""
    check("rotary_embedding", x, cos, sin)
    (a, b), rest = _split(x, cos, interleaved)
    c, s = (_for_heads(t, x) for t in (cos, sin))
    return _joined((a * c - b * s, b * c + a * s), rest, interleaved)


def rotary_embedding_backward(
    dout: Tensor, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dcos and dsin, in the dtypes of `x`, `cos` and `sin`."""
    check("rotary_embedding_backward", x, cos, sin)
    check_cotangent("rotary_embedding_backward", dout, x)
    (a, b), _ = _split(x, cos, interleaved)
    (da, db), rest = _split(dout, cos, interleaved)
    c, s = (_for_heads(t, x) for t in (cos, sin))
    dx = _joined((da * c + db * s, db * c - da * s), rest, interleaved)
    shared = [1] if cos.dim() == 3 else [0, 1]
    dcos, dsin = (da * a + db * b).sum(shared), (db * a - da * b).sum(shared)
    return dx, contiguous(dcos.to(cos.dtype)), contiguous(dsin.to(sin.dtype))


def _split(x: Tensor, cos: Tensor, interleaved: bool) -> tuple[Pairs, Tensor]:
    """The pairs, in the dtype of computation, and the channels that stay."""
    half = cos.shape[-1]
    turned = x[..., : 2 * half].to(wide(x.dtype))
    if interleaved:
        return (turned[..., ::2], turned[..., 1::2]), x[..., 2 * half :]
    return (turned[..., :half], turned[..., half:]), x[..., 2 * half :]


def _joined(pairs: Pairs, rest: Tensor, interleaved: bool) -> Tensor:
    turned = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
    return contiguous(torch.cat([turned.to(rest.dtype), rest], -1))


def _for_heads(t: Tensor, x: Tensor) -> Tensor:
    """cos or sin as (b or 1, 1, l, r/2), in the dtype of computation."""
    return t.to(wide(x.dtype)).unsqueeze(-3)
