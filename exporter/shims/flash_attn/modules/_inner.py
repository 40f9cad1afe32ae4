"""Attention as a module of its own, by the functions of `flash_attn` or by plain products."""

from typing import Any

import torch
from torch import Tensor, nn

from ..flash_attn_interface import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

__all__ = ["CrossAttention", "FlashCrossAttention", "FlashSelfAttention", "SelfAttention"]

# What is added to a score that a query is not to see. It is no infinity, and so a row in which
# there is nothing to be seen is the mean by what the scores are.
_HIDDEN = -10000.0


class FlashSelfAttention(nn.Module):
    """Attention of a sequence to itself.

    Args:
        causal: whether a query sees no key after it.
        softmax_scale: None for 1/√d.
        attention_dropout: must be 0 in training.
        window_size: how far a query sees back and ahead; -1 for to the end.
        alibi_slopes: (h,), or None.
        deterministic: has no effect.
    """

    alibi_slopes: Tensor | None

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        window_size: tuple[int, int] = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
    ) -> None:
        super().__init__()
        self.causal = causal
        self.softmax_scale = softmax_scale
        self.drop = nn.Dropout(attention_dropout)
        self.register_buffer("alibi_slopes", alibi_slopes, persistent=False)
        self.window_size = window_size
        self.deterministic = deterministic

    def forward(
        self,
        qkv: Tensor,
        causal: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """(b, l, 3, h, d) → (b, l, h, d); packed, with cu_seqlens, (n, 3, h, d) → (n, h, d).

        Raises:
            ValueError: there is dropout, in training.
        """
        dropout = self.drop.p if self.training else 0.0
        causal = self.causal if causal is None else causal
        rest = _options(self, dropout, causal)
        if cu_seqlens is None:
            y: Tensor = flash_attn_qkvpacked_func(qkv, **rest)
        else:
            y = flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, **rest)
        return y


class FlashCrossAttention(nn.Module):
    """Attention of one sequence to another.

    Args:
        causal: whether a query sees no key after it; the last of both are at one place.
        softmax_scale: None for 1/√d.
        attention_dropout: must be 0 in training.
        alibi_slopes: (h,), or None.
        window_size: how far a query sees back and ahead; -1 for to the end.
        deterministic: has no effect.
    """

    alibi_slopes: Tensor | None

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        alibi_slopes: Tensor | None = None,
        window_size: tuple[int, int] = (-1, -1),
        deterministic: bool = False,
    ) -> None:
        super().__init__()
        self.causal = causal
        self.softmax_scale = softmax_scale
        self.drop = nn.Dropout(attention_dropout)
        self.register_buffer("alibi_slopes", alibi_slopes, persistent=False)
        self.window_size = window_size
        self.deterministic = deterministic

    def forward(
        self,
        q: Tensor,
        kv: Tensor,
        causal: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_k: int | None = None,
    ) -> Tensor:
        """(b, l, h, d) and (b, m, 2, g, d) → (b, l, h, d); packed, all without b.

        Raises:
            ValueError: there is dropout, in training; or cu_seqlens without cu_seqlens_k.
        """
        dropout = self.drop.p if self.training else 0.0
        causal = self.causal if causal is None else causal
        rest = _options(self, dropout, causal)
        if cu_seqlens is None:
            y: Tensor = flash_attn_kvpacked_func(q, kv, **rest)
            return y
        if cu_seqlens_k is None:
            raise ValueError("FlashCrossAttention needs cu_seqlens_k beside cu_seqlens")
        lengths = (cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen_k)
        y = flash_attn_varlen_kvpacked_func(q, kv, *lengths, **rest)
        return y


class SelfAttention(nn.Module):
    """Attention of a sequence to itself, by plain products.

    Args:
        causal: whether a query sees no key after it.
        softmax_scale: None for 1/√d.
        attention_dropout: of the weights, in training.
    """

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.causal = causal
        self.softmax_scale = softmax_scale
        self.drop = nn.Dropout(attention_dropout)

    def forward(
        self, qkv: Tensor, causal: bool | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """(b, l, 3, h, d) → (b, l, h, d); of key_padding_mask, (b, l), keys that are True count."""
        q, k, v = qkv.unbind(2)
        causal = self.causal if causal is None else causal
        weights = _weights(q, k, self.softmax_scale, causal, key_padding_mask)
        return _mixed(self.drop(weights), v)


class CrossAttention(nn.Module):
    """Attention of one sequence to another, by plain products.

    Args:
        causal: whether a query sees no key after it; the last of both are at one place.
        softmax_scale: None for 1/√d.
        attention_dropout: of the weights, in training.
    """

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.causal = causal
        self.softmax_scale = softmax_scale
        self.drop = nn.Dropout(attention_dropout)

    def forward(
        self,
        q: Tensor,
        kv: Tensor,
        causal: bool | None = None,
        key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """(b, l, h, d) and (b, m, 2, g, d) → (b, l, h, d); of key_padding_mask, (b, m), keys that
        are True count."""
        k, v = kv.unbind(2)
        shared = q.shape[2] // k.shape[2]
        if shared > 1:
            k, v = (t.repeat_interleave(shared, 2) for t in (k, v))
        causal = self.causal if causal is None else causal
        weights = _weights(q, k, self.softmax_scale, causal, key_padding_mask)
        return _mixed(self.drop(weights), v)


def _options(
    module: FlashSelfAttention | FlashCrossAttention, dropout_p: float, causal: bool
) -> dict[str, Any]:
    return {
        "dropout_p": dropout_p,
        "softmax_scale": module.softmax_scale,
        "causal": causal,
        "window_size": module.window_size,
        "alibi_slopes": module.alibi_slopes,
    }


def _weights(
    q: Tensor, k: Tensor, scale: float | None, causal: bool, key_padding_mask: Tensor | None
) -> Tensor:
    """(b, l, h, d) and (b, m, h, d) → (b, h, l, m), in q's dtype; rows have the sum 1."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.matmul(q.transpose(1, 2), k.permute(0, 2, 3, 1) * scale)
    if key_padding_mask is not None:
        hidden = ~key_padding_mask.bool()[:, None, None]
        scores = scores + hidden.to(scores.dtype) * _HIDDEN
    if causal:
        length, seen = q.shape[1], k.shape[1]
        last = torch.arange(length, device=q.device)[:, None] + (seen - length)
        after = torch.arange(seen, device=q.device) > last
        scores = scores + after.to(scores.dtype) * _HIDDEN
    return scores.softmax(-1)


def _mixed(weights: Tensor, v: Tensor) -> Tensor:
    """(b, h, l, m) and (b, m, h, d) → (b, l, h, d), contiguous."""
    return torch.matmul(weights, v.transpose(1, 2)).transpose(1, 2).contiguous()
