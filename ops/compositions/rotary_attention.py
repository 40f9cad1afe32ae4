"""Attention over a projection's queries, keys and values, some channels turned by their position.

Sources: Vaswani et al., "Attention is all you need", 2017, equation 1; Ainslie et al., "GQA", 2023,
for queries that share keys; Su et al., "RoFormer", 2021, for the turning. b batch, l positions, H
heads of queries, K of keys and values, P channels to a head.
"""

import math
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.ops.rotary_embedding import rotary_embedding

__all__ = ["Heads", "rotary_attention"]


@dataclass(frozen=True, kw_only=True)
class Heads:
    """How a row is queries, keys and values, and what is computed of them.

    Attributes:
        queries: H, a multiple of K.
        keys: K.
        width: P.
        turned: channels of a head that are turned, even; 0 for none.
        base: of the frequencies base^(-2i/turned).
        interleaved: pairs are neighbouring channels, and not one of each half.
        scale: of the products; None for 1/√P.
        causal: whether a position sees none after it.

    Raises:
        ValueError: a value is of another type, or makes no sense.
    """

    queries: int
    keys: int
    width: int
    turned: int = 0
    base: float = 10000.0
    interleaved: bool = False
    scale: float | None = None
    causal: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in (int, bool) and type(value) is not field.type:
                raise ValueError(f"{field.name} is {value!r}, expected {field.type}")
        if min(self.queries, self.keys, self.width) < 1 or self.queries % self.keys:
            raise ValueError(
                f"{self.queries} heads of {self.width} channels with {self.keys} of keys"
            )
        if self.turned % 2 or not 0 <= self.turned <= self.width:
            raise ValueError(f"{self.turned} channels of {self.width} cannot be turned in pairs")
        for name in ("base", "scale"):
            number = getattr(self, name)
            if number is None and name == "scale":
                continue
            if type(number) not in (int, float) or not 0 < number < math.inf:
                raise ValueError(f"{name} is {number!r}, expected a positive number")

    @property
    def channels(self) -> int:
        """P·(H + 2K), of a row."""
        return self.width * (self.queries + 2 * self.keys)


def rotary_attention(
    qkv: Tensor, heads: Heads, past: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax(scale·q·kᵀ)·v by heads.

    Args:
        qkv: (b, l, P·(H + 2K)): the queries of all heads, their keys, their values.
        heads: what these are.
        past: keys, turned, and values of the positions before, (b, K, past, P) each; with them l is
            1.

    Returns:
        (b, l, P·H), and the keys and values of all positions, (b, K, past + l, P) each.
    """
    parts = [heads.queries, heads.keys, heads.keys]
    q, k, v = qkv.unflatten(-1, (-1, heads.width)).transpose(1, 2).split(parts, 1)
    first = 0 if past is None else past[0].shape[2]
    q, k = _turned(q, first, heads), _turned(k, first, heads)
    shared = heads.queries // heads.keys
    if past is None:
        all_k, all_v = (t.repeat_interleave(shared, 1) if shared > 1 else t for t in (k, v))
        y = F.scaled_dot_product_attention(
            q, all_k, all_v, is_causal=heads.causal, scale=heads.scale
        )
        return y.transpose(1, 2).flatten(-2), k, v
    k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
    # One position: the queries that share keys are as many positions of one head, without a copy.
    by_keys = q.squeeze(2).unflatten(1, (heads.keys, shared))
    y = F.scaled_dot_product_attention(by_keys, k, v, scale=heads.scale)
    return y.flatten(1).unsqueeze(1), k, v


def _turned(x: Tensor, first: int, heads: Heads) -> Tensor:
    """(b, h, l, P) of positions from `first` on."""
    if heads.turned == 0:
        return x
    dtype = torch.promote_types(x.dtype, torch.float32)
    exponents = torch.arange(0, heads.turned, 2, device=x.device).to(dtype)
    places = torch.arange(first, first + x.shape[2], device=x.device).to(dtype)
    angles = places[:, None] * heads.base ** -(exponents / heads.turned)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return rotary_embedding(x, cos, sin, heads.interleaved)
