"""Attention with its projections."""

from typing import Any

import torch
from torch import Tensor, nn

from .._refused import plain, refuse_parallel
from ..module import LayerNorm, LayerNormLinear, Linear, RMSNorm
from ..module.base import Init, TransformerEngineBaseModule
from .dot_product_attention import DotProductAttention
from .dot_product_attention._masks import is_from_end
from .inference import refuse_cache
from .rope import apply_rotary_pos_emb

__all__ = ["L2Normalization", "MultiheadAttention"]


class L2Normalization(TransformerEngineBaseModule):
    """x / √(Σx² + eps) over the last dimension, computed in float32 at least."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(…, d) → the same."""
        real = x.to(torch.promote_types(torch.float32, x.dtype))
        return (real * torch.rsqrt(real.square().sum(-1, keepdim=True) + self.eps)).to(x.dtype)


class MultiheadAttention(nn.Module):
    """Attention of a sequence to itself or to another, with its projections.

    Args:
        hidden_size: of input and output.
        num_attention_heads: of queries.
        kv_channels: of a head; None for hidden_size / num_attention_heads.
        attention_dropout: the part of the weights that is left out at random, in training.
        layernorm_epsilon: under the norm's root.
        init_method: initial values of the first weights; None for a normal distribution.
        output_layer_init_method: initial values of the last weight, as init_method.
        layer_number: has no effect.
        attn_mask_type: as `DotProductAttention` has it, with the next two.
        tp_group: the processes that it is divided among, one at most, or None.
        tp_size: how many without a group.
        num_gqa_groups: heads of keys and values, a divisor of the heads; None for as many.
        params_dtype: of the parameters; None for torch's default.
        return_bias: whether the last bias is returned instead of added.
        return_layernorm_output: whether the norm is returned, too.
        input_layernorm: whether there is a norm, of what queries are made of.
        attention_type: "self" or "cross".
        set_parallel_mode: whether the last bias is added to the rounded product.
        fuse_qkv_params: whether queries, keys and values have one weight, or one each.
        zero_centered_gamma: whether 1 is added to the norm's weight.
        qkv_weight_interleaved: whether the rows of the one weight go by groups of heads; else
            queries, keys and values follow one another.
        rotary_pos_interleaved: whether the channels of a pair are neighbours.
        bias: whether the linear layers have one.
        normalization: "LayerNorm" or "RMSNorm".
        device: where parameters are; None for torch's default.
        qkv_format: the order of dimensions, as `DotProductAttention` has it.
        name: has no effect.
        qk_norm_type: of queries and keys: None, "L2Normalization", "RMSNorm" or "LayerNorm".
        qk_norm_eps: under its root.
        qk_norm_before_rope: whether it comes before the rotary embedding.
        softmax_type: as `DotProductAttention` has it.
        tuning: options that have no effect.

    Raises:
        NotImplementedError: there is more than one process.
        TypeError: an option is unknown.
        ValueError: an argument is none of what it may be; heads do not divide.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method: Init | None = None,
        output_layer_init_method: Init | None = None,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        *,
        tp_group: Any = None,
        tp_size: int = 1,
        num_gqa_groups: int | None = None,
        params_dtype: torch.dtype | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        attention_type: str = "self",
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        rotary_pos_interleaved: bool = False,
        bias: bool = True,
        normalization: str = "LayerNorm",
        device: Any = None,
        qkv_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        softmax_type: str = "vanilla",
        **tuning: Any,
    ) -> None:
        super().__init__()
        plain("MultiheadAttention", tuning)
        refuse_parallel("MultiheadAttention", tp_group, tp_size)
        self.attn_mask_type = attn_mask_type
        self.window_size = window_size
        self.bottom_right_diagonal = bottom_right_diagonal
        self.layer_number = layer_number or 1
        self.return_bias = return_bias
        self.return_layernorm_output = input_layernorm and return_layernorm_output
        self.input_layernorm = input_layernorm
        self.attention_type = attention_type
        self.qkv_format = qkv_format
        self.qkv_weight_interleaved = fuse_qkv_params and qkv_weight_interleaved
        self.rotary_pos_interleaved = rotary_pos_interleaved
        self.qk_norm_before_rope = qk_norm_before_rope
        self.num_attention_heads = num_attention_heads
        self.num_gqa_groups = num_gqa_groups or num_attention_heads
        width = kv_channels or hidden_size // num_attention_heads
        self.hidden_size_per_attention_head = width
        of_queries, of_keys = num_attention_heads * width, self.num_gqa_groups * width
        made = {"params_dtype": params_dtype, "device": device}
        self.q_norm, self.k_norm = _qk_norms(qk_norm_type, width, qk_norm_eps, made)
        first = {**made, "init_method": init_method, "bias": bias}
        with_norm = {
            **first,
            "eps": layernorm_epsilon,
            "normalization": normalization,
            "zero_centered_gamma": zero_centered_gamma,
            "return_layernorm_output": return_layernorm_output,
        }
        of_all = {"query": of_queries, "key": of_keys, "value": of_keys}
        rows, split = sum(of_all.values()), None if fuse_qkv_params else of_all
        if attention_type == "self" and input_layernorm:
            self.layernorm_qkv = LayerNormLinear(
                hidden_size, rows, parameters_split=split, **with_norm
            )
        elif attention_type == "self":
            self.qkv = Linear(hidden_size, rows, parameters_split=split, **first)
        else:
            if input_layernorm:
                query = None if fuse_qkv_params else ("query",)
                self.layernorm_query = LayerNormLinear(
                    hidden_size, of_queries, parameters_split=query, **with_norm
                )
            else:
                self.query_layer = Linear(hidden_size, of_queries, **first)
            both = None if fuse_qkv_params else ("key", "value")
            self.key_value = Linear(hidden_size, 2 * of_keys, parameters_split=both, **first)
        self.core_attention = DotProductAttention(
            num_attention_heads,
            width,
            self.num_gqa_groups,
            attention_dropout,
            qkv_format,
            attention_type=attention_type,
            softmax_type=softmax_type,
        )
        self.proj = Linear(
            of_queries,
            hidden_size,
            init_method=output_layer_init_method,
            bias=bias,
            return_bias=return_bias,
            parallel_mode="row" if set_parallel_mode else None,
            **made,
        )

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Refuses a group of more than one process."""
        refuse_parallel("MultiheadAttention", tp_group, 1)

    def set_context_parallel_group(self, cp_group: Any, *args: Any, **kwargs: Any) -> None:
        """Refuses a group of more than one process."""
        self.core_attention.set_context_parallel_group(cp_group)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        encoder_output: Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        is_first_microbatch: bool | None = None,
        checkpoint_core_attention: bool = False,
        inference_params: Any = None,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: Any = None,
        max_seqlen_kv: Any = None,
        fast_zero_fill: bool = True,
        pad_between_seqs: bool | None = None,
    ) -> Any:
        """Attention of hidden_states, to itself or to encoder_output.

        Args:
            hidden_states: (s, b, hidden_size), (b, s, hidden_size) or (t, hidden_size).
            encoder_output: the same, for "cross".
            rotary_pos_emb: angles as `RotaryPositionEmbedding` makes them, or those of queries and
                those of keys.

        Other arguments are as `DotProductAttention.forward` has them.

        Returns:
            hidden_states' shape; then the last bias, or None, and the norm, as asked.
        """
        if inference_params is not None:
            refuse_cache()
        q, k, v, normed = self._projected(hidden_states, encoder_output)
        if self.q_norm is not None and self.qk_norm_before_rope:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotary_pos_emb is not None:
            angles = rotary_pos_emb if isinstance(rotary_pos_emb, tuple) else (rotary_pos_emb,) * 2
            starts = (cu_seqlens_q, cu_seqlens_kv)
            if pad_between_seqs:
                starts = (cu_seqlens_q_padded, cu_seqlens_kv_padded)
            q, k = (
                apply_rotary_pos_emb(
                    x,
                    of_x,
                    self.qkv_format,
                    interleaved=self.rotary_pos_interleaved,
                    fused=True,
                    cu_seqlens=start,
                )
                for x, of_x, start in zip((q, k), angles, starts, strict=True)
            )
        if self.q_norm is not None and not self.qk_norm_before_rope:
            q, k = self.q_norm(q), self.k_norm(k)
        kind = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        if bottom_right_diagonal is None:
            bottom_right_diagonal = self.bottom_right_diagonal
        context = self.core_attention(
            q,
            k,
            v,
            attention_mask,
            self.qkv_format,
            cu_seqlens_q,
            cu_seqlens_kv,
            cu_seqlens_q_padded,
            cu_seqlens_kv_padded,
            attn_mask_type=kind,
            window_size=self.window_size if window_size is None else window_size,
            bottom_right_diagonal=is_from_end(kind, bottom_right_diagonal),
            core_attention_bias_type=core_attention_bias_type,
            core_attention_bias=core_attention_bias,
            alibi_slopes=alibi_slopes,
        )
        out = self.proj(context)
        outs = out if self.return_bias else (out,)
        outs = (*outs, normed) if self.return_layernorm_output else outs
        return outs if len(outs) > 1 else out

    def _projected(
        self, x: Tensor, encoder_output: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """(…, hidden_size) → queries, (…, h, d), keys and values, (…, g, d), and the norm."""
        width, groups = self.hidden_size_per_attention_head, self.num_gqa_groups
        shared = self.num_attention_heads // groups
        normed = None
        if self.attention_type == "self":
            out = self.layernorm_qkv(x) if self.input_layernorm else self.qkv(x)
            out, normed = out if self.return_layernorm_output else (out, None)
            q, k, v = self._parts(out, (shared, 1, 1))
            return q, k, v, normed
        if encoder_output is None:
            raise ValueError("MultiheadAttention: encoder_output is needed for cross")
        k, v = self._parts(self.key_value(encoder_output), (1, 1))
        out = self.layernorm_query(x) if self.input_layernorm else self.query_layer(x)
        out, normed = out if self.return_layernorm_output else (out, None)
        return out.unflatten(-1, (-1, width)), k, v, normed

    def _parts(self, x: Tensor, sizes: tuple[int, ...]) -> list[Tensor]:
        """(…, rows of one weight) → parts, (…, heads, d), of so many heads for each group."""
        width, groups = self.hidden_size_per_attention_head, self.num_gqa_groups
        if self.qkv_weight_interleaved:
            parts = x.unflatten(-1, (groups, sum(sizes), width)).split(sizes, -2)
            return [part.flatten(-3, -2) for part in parts]
        heads = x.unflatten(-1, (groups * sum(sizes), width))
        return [*heads.split([groups * size for size in sizes], -2)]


def _qk_norms(kind: str | None, width: int, eps: float, made: dict[str, Any]) -> Any:
    if kind is None:
        return None, None
    if kind == "L2Normalization":
        norm = L2Normalization(eps)
        return norm, norm
    if kind not in ("RMSNorm", "LayerNorm"):
        raise ValueError(f"qk_norm_type is {kind!r}; it is L2Normalization, RMSNorm or LayerNorm")
    of = RMSNorm if kind == "RMSNorm" else LayerNorm
    return of(width, eps, **made), of(width, eps, **made)
