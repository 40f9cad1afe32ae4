"""The attention layer, over whole sequences."""

import math
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..layers.rotary import RotaryEmbedding
from ..ops.fused_dense import FusedDense, refuse_parallel
from ._inner import CrossAttention, FlashCrossAttention, FlashSelfAttention, SelfAttention

__all__ = [
    "MHA",
    "CrossAttention",
    "FlashCrossAttention",
    "FlashSelfAttention",
    "LinearResidual",
    "ParallelMHA",
    "SelfAttention",
    "get_alibi_slopes",
]


def get_alibi_slopes(nheads: int) -> list[float]:
    """2^(-8·i/n) for i of 1 to n, n heads; of other numbers than powers of two, those of the power
    below, and between them (Press et al., "Train short, test long", 2022)."""
    power = 2 ** math.floor(math.log2(nheads))
    slopes = [2.0 ** (-8.0 * i / power) for i in range(1, power + 1)]
    between = [2.0 ** (-4.0 * i / power) for i in range(1, 2 * power, 2)]
    return slopes + between[: nheads - power]


class LinearResidual(nn.Linear):
    """A linear layer that also returns its input."""

    def forward(self, input: Tensor) -> Any:
        """(…, n) → (…, m) and the input."""
        return super().forward(input), input


class MHA(nn.Module):
    """Attention of a sequence to itself or to another, with its projections.

    Args:
        embed_dim: width of input and output.
        num_heads: of queries.
        num_heads_kv: of keys and values, a divisor of num_heads; None for as many.
        cross_attn: whether keys are of another sequence.
        qkv_proj_bias: whether the first projections have biases.
        out_proj_bias: whether the last one has one.
        dropout: of the weights, in training; with use_flash_attn it must be 0 there.
        softmax_scale: None for 1/√d.
        causal: whether a query sees no key after it.
        layer_idx: has no effect.
        dwconv: whether a causal filter of three steps follows the first projections.
        rotary_emb_dim: channels of a head that are turned by their position; 0 for none.
        rotary_emb_base: of the angles' frequencies.
        rotary_emb_scale_base: of a scale by the position, or None.
        rotary_emb_interleaved: pairs are neighbouring channels, and not one of each half.
        use_alibi: whether the distance is subtracted from scores; with use_flash_attn only.
        window_size: how far a query sees back and ahead; with use_flash_attn only.
        fused_bias_fc: has no effect on values.
        use_flash_attn: by the functions of `flash_attn`, and not by plain products.
        return_residual: whether the input is returned too.
        checkpointing: attention is computed again for its gradient, in training.

    Raises:
        ValueError: options do not go together, or heads do not divide what they have to.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_heads_kv: int | None = None,
        cross_attn: bool = False,
        qkv_proj_bias: bool = True,
        out_proj_bias: bool = True,
        dropout: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        layer_idx: int | None = None,
        dwconv: bool = False,
        rotary_emb_dim: int = 0,
        rotary_emb_base: float = 10000.0,
        rotary_emb_scale_base: float | None = None,
        rotary_emb_interleaved: bool = False,
        use_alibi: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        fused_bias_fc: bool = False,
        use_flash_attn: bool = False,
        return_residual: bool = False,
        checkpointing: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_heads_kv = num_heads if num_heads_kv is None else num_heads_kv
        if num_heads % self.num_heads_kv or embed_dim % num_heads:
            raise ValueError(f"MHA: {num_heads} heads do not fit {embed_dim}, {num_heads_kv}")
        if not use_flash_attn and (use_alibi or tuple(window_size) != (-1, -1)):
            raise ValueError("MHA: use_alibi and window_size need use_flash_attn")
        if cross_attn and rotary_emb_dim > 0:
            raise ValueError("MHA: cross-attention has no rotary embedding")
        self.embed_dim = embed_dim
        self.cross_attn = cross_attn
        self.causal = causal
        self.layer_idx = layer_idx
        self.dwconv = dwconv
        self.rotary_emb_dim = rotary_emb_dim
        self.use_flash_attn = use_flash_attn
        self.return_residual = return_residual
        self.checkpointing = checkpointing
        self.head_dim = embed_dim // num_heads
        qkv_dim = self.head_dim * (num_heads + 2 * self.num_heads_kv)
        kv_dim = 2 * self.head_dim * self.num_heads_kv
        if rotary_emb_dim > 0:
            self.rotary_emb = RotaryEmbedding(
                rotary_emb_dim,
                base=rotary_emb_base,
                scale_base=rotary_emb_scale_base,
                interleaved=rotary_emb_interleaved,
                device=device,
            )
        linear: Any = partial(
            FusedDense if fused_bias_fc else nn.Linear, device=device, dtype=dtype
        )
        first: Any = linear
        if return_residual:
            first = partial(LinearResidual, device=device, dtype=dtype)
        conv: Any = partial(nn.Conv1d, kernel_size=3, padding=2, device=device, dtype=dtype)
        if cross_attn:
            self.Wq = linear(embed_dim, embed_dim, bias=qkv_proj_bias)
            self.Wkv = first(embed_dim, kv_dim, bias=qkv_proj_bias)
        else:
            self.Wqkv = first(embed_dim, qkv_dim, bias=qkv_proj_bias)
        if dwconv and not cross_attn and num_heads == self.num_heads_kv:
            self.dwconv_qkv = conv(qkv_dim, qkv_dim, groups=qkv_dim)
        elif dwconv:
            self.dwconv_q = conv(embed_dim, embed_dim, groups=embed_dim)
            self.dwconv_kv = conv(kv_dim, kv_dim, groups=kv_dim)
        plain: dict[str, Any] = {
            "causal": causal,
            "softmax_scale": softmax_scale,
            "attention_dropout": dropout,
        }
        if use_flash_attn:
            slopes = torch.tensor(get_alibi_slopes(num_heads), device=device) if use_alibi else None
            flash: dict[str, Any] = {"alibi_slopes": slopes, "window_size": window_size}
            self.inner_attn: nn.Module = FlashSelfAttention(**plain, **flash)
            self.inner_cross_attn: nn.Module = FlashCrossAttention(**plain, **flash)
        else:
            self.inner_attn, self.inner_cross_attn = SelfAttention(**plain), CrossAttention(**plain)
        self.out_proj = linear(embed_dim, embed_dim, bias=out_proj_bias)

    def forward(
        self,
        x: Tensor,
        x_kv: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        mixer_subset: Tensor | None = None,
        inference_params: Any = None,
        **kwargs: Any,
    ) -> Any:
        """(b, l, embed_dim), or packed (n, embed_dim) → the same; with `return_residual`, and x.

        Args:
            x: the sequence, or of cross-attention the queries.
            x_kv: (b, m, embed_dim), of cross-attention what keys are of; x if None.
            key_padding_mask: (b, m), True for keys that count; without use_flash_attn only.
            cu_seqlens: (b + 1,), where packed sequences begin; with use_flash_attn only.
            max_seqlen: not needed here.
            mixer_subset: of cross-attention, which steps of x are queries; None for all.
            inference_params: must be None.
            kwargs: for the inner attention, such as cu_seqlens_k.

        Raises:
            NotImplementedError: inference_params is given: keys are not kept.
            ValueError: arguments do not go together.
        """
        if inference_params is not None:
            _refuse_decoding()
        if self.use_flash_attn and key_padding_mask is not None:
            raise ValueError("MHA: with use_flash_attn there is no key_padding_mask")
        if not self.use_flash_attn and cu_seqlens is not None:
            raise ValueError("MHA: packed sequences need use_flash_attn")
        if cu_seqlens is not None and (self.dwconv or self.rotary_emb_dim > 0):
            raise ValueError("MHA: packed sequences have no filter and no rotary embedding")
        if not self.cross_attn and (x_kv is not None or mixer_subset is not None):
            raise ValueError("MHA: x_kv and mixer_subset are of cross-attention")
        if self.use_flash_attn:
            kwargs = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen, **kwargs}
        else:
            kwargs = {"key_padding_mask": key_padding_mask, **kwargs}
        if self.cross_attn:
            projected = self._first(self.Wkv, x if x_kv is None else x_kv)
            q = self.Wq(x if mixer_subset is None else x[:, mixer_subset])
            context = self._of_two(q, projected, kwargs)
        else:
            projected = self._first(self.Wqkv, x)
            width = self.num_heads * self.head_dim
            if self.num_heads == self.num_heads_kv:
                context = self._of_one(projected, kwargs)
            else:
                context = self._of_two(projected[..., :width], projected[..., width:], kwargs)
        out = self.out_proj(context.flatten(-2))
        return (out, x) if self.return_residual else out

    def allocate_inference_cache(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises NotImplementedError: keys are not kept."""
        _refuse_decoding()

    def _first(self, projection: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = projection(x)[0] if self.return_residual else projection(x)
        return y

    def _of_one(self, qkv: Tensor, kwargs: dict[str, Any]) -> Tensor:
        if self.dwconv:
            qkv = _filtered(self.dwconv_qkv, qkv)
        qkv = qkv.unflatten(-1, (3, self.num_heads, self.head_dim))
        if self.rotary_emb_dim > 0:
            qkv = self.rotary_emb(qkv)
        return self._called(self.inner_attn, qkv, **kwargs)

    def _of_two(self, q: Tensor, kv: Tensor, kwargs: dict[str, Any]) -> Tensor:
        if self.dwconv:
            q, kv = _filtered(self.dwconv_q, q), _filtered(self.dwconv_kv, kv)
        q = q.unflatten(-1, (self.num_heads, self.head_dim))
        kv = kv.unflatten(-1, (2, self.num_heads_kv, self.head_dim))
        if self.rotary_emb_dim > 0:
            q, kv = self.rotary_emb(q, kv)
        if kwargs.get("cu_seqlens") is not None and not self.cross_attn:
            kwargs = {"cu_seqlens_k": kwargs["cu_seqlens"], **kwargs}
        return self._called(self.inner_cross_attn, q, kv, **kwargs)

    def _called(self, inner: nn.Module, *args: Tensor, **kwargs: Any) -> Tensor:
        if self.checkpointing and self.training:
            found: Tensor = checkpoint(inner, *args, use_reentrant=False, **kwargs)
        else:
            found = inner(*args, **kwargs)
        return found


class ParallelMHA(nn.Module):
    """Refuses: it is of several devices."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse_parallel(type(self).__name__)


def _filtered(conv: nn.Module, x: Tensor) -> Tensor:
    """(b, l, c) through a filter over the steps up to each."""
    y: Tensor = conv(x.mT)
    return y[..., :-2].mT


def _refuse_decoding() -> NoReturn:
    raise NotImplementedError("fuseport's MHA does not decode: it keeps no keys")
