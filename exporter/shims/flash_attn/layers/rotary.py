"""Rotary embeddings of queries and keys, over the registered op, without in-place writes."""

from typing import Any

import torch
from torch import Tensor, nn

from ..ops.triton.rotary import apply_rotary

__all__ = [
    "RotaryEmbedding",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch",
    "rotate_half",
]


def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """Pairs (a, b) of the last dimension → (-b, a)."""
    if interleaved:
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def apply_rotary_emb_torch(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> Tensor:
    """(b, l, h, p), turned by (l, r/2) or (b, l, r/2): their function in plain torch."""
    return apply_rotary(x, cos, sin, interleaved=interleaved)


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """`apply_rotary`, differentiable; x stays as it is, `inplace` or not."""
    return apply_rotary(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen, interleaved)


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Queries and keys in one tensor with values, turned; qkv stays as it is.

    Args:
        qkv: (b, l, 3, h, p); or (b, l, h + 2·g, p) with num_heads_q.
        cos: (m, r/2), m at least l and the offset.
        sin: as cos.
        cos_k: of the keys; None for the same.
        sin_k: of the keys; None for the same.
        interleaved: which channels are pairs.
        seqlen_offsets: which step the first is, a number or (b,).
        num_heads_q: h.

    Returns:
        qkv's shape and dtype.

    Raises:
        ValueError: qkv has no such shape, or as the op.
    """
    cos_k, sin_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    of_q: dict[str, Any] = {"interleaved": interleaved, "seqlen_offsets": seqlen_offsets}
    if qkv.dim() == 5:
        q, k, v = qkv.unbind(2)
    elif qkv.dim() == 4 and num_heads_q is not None:
        shared = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split([num_heads_q, shared, shared], 2)
    else:
        raise ValueError(
            f"qkv is (b, l, 3, h, p), or (b, l, h + 2g, p) with num_heads_q, not {tuple(qkv.shape)}"
        )
    q, k = apply_rotary_emb(q, cos, sin, **of_q), apply_rotary_emb(k, cos_k, sin_k, **of_q)
    return torch.stack([q, k, v], 2) if qkv.dim() == 5 else torch.cat([q, k, v], 2)


def apply_rotary_emb_kv_(
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
) -> Tensor:
    """Keys in one tensor with values, (b, l, 2, h, p), turned; kv stays as it is."""
    k, v = kv.unbind(2)
    k = apply_rotary_emb(k, cos, sin, interleaved, seqlen_offsets=seqlen_offsets)
    return torch.stack([k, v], 2)


class RotaryEmbedding(nn.Module):
    """Angles of steps, which grow with them, and the turning of queries and keys by them.

    Tables are made anew in each forward, in float64 for float64 inputs and float32 else.

    Args:
        dim: channels of a head that are turned, r.
        base: of the frequencies base^(-2i/r).
        interleaved: pairs are channels 2i and 2i + 1; else i and i + r/2.
        scale_base: steps over which pairs are scaled by once their factor (Sun et al., "A
            length-extrapolatable transformer", 2022); None for no scale.
        pos_idx_in_fp32: whether steps and frequencies are float32 where the module is of less.
    """

    inv_freq: Tensor
    scale: Tensor | None

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        pos_idx_in_fp32: bool = True,
        device: Any = None,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.base = float(base)
        self.interleaved = interleaved
        self.scale_base = scale_base
        self.pos_idx_in_fp32 = pos_idx_in_fp32
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        even = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
        scale = None if scale_base is None else (even + 0.4 * dim) / (1.4 * dim)
        self.register_buffer("scale", scale, persistent=False)
        self._seq_len_cached = 0
        self._cos_cached: Tensor | None = None
        self._sin_cached: Tensor | None = None
        self._cos_k_cached: Tensor | None = None
        self._sin_k_cached: Tensor | None = None

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Any:
        """The same tensors, turned; they stay as they are.

        Args:
            qkv: (b, l, 3, h, p); or (b, l, h + 2·g, p) with num_heads_q; or, beside kv, queries
                (b, l, h, p).
            kv: (b, m, 2, g, p), or None.
            seqlen_offset: which step the first is, a number or (b,).
            max_seqlen: more than any step; needed where seqlen_offset is a tensor.
            num_heads_q: h.

        Returns:
            qkv; or the queries and kv.

        Raises:
            ValueError: seqlen_offset is a tensor and there is no max_seqlen; or as the op.
        """
        if max_seqlen is None:
            if isinstance(seqlen_offset, Tensor):
                raise ValueError("RotaryEmbedding needs max_seqlen where seqlen_offset is a tensor")
            max_seqlen = qkv.shape[1] + seqlen_offset
        self._update_cos_sin_cache(max_seqlen, device=qkv.device, dtype=qkv.dtype)
        cos, sin = self._cos_cached, self._sin_cached
        assert cos is not None
        assert sin is not None
        cos_k, sin_k = (cos, sin) if self.scale is None else self._of_keys()
        of_all: dict[str, Any] = {
            "interleaved": self.interleaved,
            "seqlen_offsets": seqlen_offset,
        }
        if kv is None:
            return apply_rotary_emb_qkv_(
                qkv, cos, sin, cos_k, sin_k, num_heads_q=num_heads_q, **of_all
            )
        q = apply_rotary_emb_func(qkv, cos, sin, **of_all)
        return q, apply_rotary_emb_kv_(kv, cos_k, sin_k, **of_all)

    def _compute_inv_freq(self, device: Any = None) -> Tensor:
        even = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        return 1.0 / self.base ** (even / self.dim)

    def _of_keys(self) -> tuple[Tensor, Tensor]:
        assert self._cos_k_cached is not None
        assert self._sin_k_cached is not None
        return self._cos_k_cached, self._sin_k_cached

    def _update_cos_sin_cache(
        self, seqlen: int, device: Any = None, dtype: torch.dtype | None = None
    ) -> None:
        """Sets the tables, (seqlen, r/2), in `dtype`. Subclasses of the user's have their own."""
        frequencies = self.inv_freq
        if self.pos_idx_in_fp32:
            if frequencies.dtype in (torch.float16, torch.bfloat16):
                frequencies = self._compute_inv_freq(device)
            if dtype == torch.float64:
                frequencies = frequencies.double()
        steps = torch.arange(seqlen, device=device)
        angles = steps.to(frequencies.dtype)[:, None] * frequencies.to(device)
        cos, sin = angles.cos(), angles.sin()
        self._seq_len_cached = seqlen
        if self.scale is None:
            self._cos_cached, self._sin_cached = cos.to(dtype), sin.to(dtype)
            return
        assert self.scale_base is not None
        power = (steps - seqlen // 2).to(self.scale.dtype) / self.scale_base
        scale = self.scale.to(device) ** power[:, None]
        self._cos_cached, self._sin_cached = (cos * scale).to(dtype), (sin * scale).to(dtype)
        self._cos_k_cached, self._sin_k_cached = (cos / scale).to(dtype), (sin / scale).to(dtype)
