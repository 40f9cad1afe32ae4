"""The attention of hybrids with Mamba layers, over whole sequences."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuseport.ops.causal_conv1d import causal_conv1d
from fuseport.ops.compositions.rotary_attention import Heads, rotary_attention

__all__ = ["MHA"]


class MHA(nn.Module):
    """Attention with a causal filter before it and a gated MLP beside it, each if wanted.

    Args:
        embed_dim: width of input and output.
        num_heads: of queries.
        num_heads_kv: of keys and values, a divisor of num_heads; None for as many.
        head_dim: None for embed_dim / num_heads.
        mlp_dim: of the MLP before its gate, rounded up to a multiple of 256; 0 for none.
        qkv_proj_bias: whether the first projection has a bias.
        out_proj_bias: whether the last one has one.
        softmax_scale: None for 1/√head_dim.
        causal: whether a position sees none after it.
        layer_idx: has no effect.
        d_conv: width of the filter; 0 for none.
        rotary_emb_dim: channels of a head that are turned by their position; 0 for none.
        rotary_emb_base: of the angles' frequencies.
        rotary_emb_interleaved: pairs are neighbouring channels, and not one of each half.

    Raises:
        ValueError: numbers of heads do not divide what they have to.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_heads_kv: int | None = None,
        head_dim: int | None = None,
        mlp_dim: int = 0,
        qkv_proj_bias: bool = True,
        out_proj_bias: bool = True,
        softmax_scale: float | None = None,
        causal: bool = False,
        layer_idx: int | None = None,
        d_conv: int = 0,
        rotary_emb_dim: int = 0,
        rotary_emb_base: float = 10000.0,
        rotary_emb_interleaved: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_heads_kv = num_heads if num_heads_kv is None else num_heads_kv
        if num_heads % self.num_heads_kv or (head_dim is None and embed_dim % num_heads):
            raise ValueError(f"MHA: {num_heads} heads do not fit {embed_dim}, {num_heads_kv}")
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embed_dim = embed_dim
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.mlp_dim = math.ceil(mlp_dim / 256) * 256
        self.softmax_scale = softmax_scale
        self.causal = causal
        self.layer_idx = layer_idx
        self.d_conv = d_conv
        self.rotary_emb_dim = rotary_emb_dim
        self.rotary_emb_base = rotary_emb_base
        self.rotary_emb_interleaved = rotary_emb_interleaved
        attended = self._heads.channels
        self.in_proj = nn.Linear(embed_dim, attended + self.mlp_dim, bias=qkv_proj_bias, **factory)
        if d_conv > 0:
            self.conv1d = nn.Conv1d(
                attended, attended, d_conv, padding=d_conv - 1, groups=attended, **factory
            )
        given = self.head_dim * num_heads + self.mlp_dim // 2
        self.out_proj = nn.Linear(given, embed_dim, bias=out_proj_bias, **factory)

    def forward(self, x: Tensor, inference_params: Any = None) -> Tensor:
        """(b, l, embed_dim) → the same.

        Raises:
            NotImplementedError: inference_params is given; keys are not kept.
        """
        if inference_params is not None:
            raise NotImplementedError("fuseport's MHA does not decode: it keeps no keys")
        projected = self.in_proj(x)
        qkv, beside = projected.split([projected.shape[-1] - self.mlp_dim, self.mlp_dim], -1)
        if self.d_conv > 0:
            qkv = causal_conv1d(qkv.mT, self.conv1d.weight.flatten(1), self.conv1d.bias).mT
        y, _, _ = rotary_attention(qkv, self._heads)
        if self.mlp_dim:
            up, gate = beside.chunk(2, -1)
            y = torch.cat([y, up * F.silu(gate)], -1)
        out: Tensor = self.out_proj(y)
        return out

    def allocate_inference_cache(self, *args: Any, **kwargs: Any) -> Any:
        """Raises NotImplementedError: keys are not kept."""
        raise NotImplementedError("fuseport's MHA does not decode: it keeps no keys")

    @property
    def _heads(self) -> Heads:
        return Heads(
            queries=self.num_heads,
            keys=self.num_heads_kv,
            width=self.head_dim,
            turned=self.rotary_emb_dim,
            base=self.rotary_emb_base,
            interleaved=self.rotary_emb_interleaved,
            scale=self.softmax_scale,
            causal=self.causal,
        )
