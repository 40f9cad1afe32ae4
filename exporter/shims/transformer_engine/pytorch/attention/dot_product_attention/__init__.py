"""Attention without projections."""

from typing import Any

import torch
from torch import Tensor, nn

from fuseport.exporter.shims._sizes import always

from ..._refused import plain, refuse, refuse_parallel
from ...module.base import Scaled, TransformerEngineBaseModule
from ..inference import refuse_cache
from ._attention import Options, attend, packed_places, places, slopes_of
from ._masks import is_from_end, mask_name, padding_of, window_of

__all__ = ["DotProductAttention"]

_FORMATS = ("sbhd", "bshd", "thd")
_BIASES = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")


class FusedAttention(Scaled):
    """Where checkpoints of versions 1.6 and 1.7 have the scales of FP8: they have no effect."""


class DotProductAttention(TransformerEngineBaseModule):
    """Attention of queries to keys, each softmax computed in float32 at least.

    Queries that a mask leaves no key have zeros; with "arbitrary" they have the mean of all values.
    Sequences may be padded on any side, as a mask says.

    Args:
        num_attention_heads: of queries.
        kv_channels: of a head, or those of keys and those of values.
        num_gqa_groups: heads of keys and values, a divisor of the heads; None for as many.
        attention_dropout: the part of the weights that is left out at random, in training.
        qkv_format: the order of dimensions: "sbhd" steps, batch, heads, channels; "bshd"; or "thd",
            sequences that follow one another.
        attn_mask_type: one of no_mask, padding, causal, padding_causal, causal_bottom_right,
            padding_causal_bottom_right, arbitrary.
        window_size: how many keys before a query's place, and after it, it sees; -1 for all.
        bottom_right_diagonal: whether the last of both are at one place, for masks whose names do
            not say; None for yes.
        tp_size: how many processes there are without a group, one at most.
        tp_group: the processes, or None.
        layer_number: has no effect.
        attention_type: "self" or "cross".
        cp_group: the processes that share the steps, one at most, or None.
        softmax_scale: of the scores; None for 1/√d.
        softmax_type: "vanilla"; "off-by-one", with a key more whose score is 0 and whose value is
            0; or "learnable", where that score is a parameter of each head.
        return_max_logit: must be False.
        name: has no effect.
        tuning: options that have no effect.

    Raises:
        NotImplementedError: there is more than one process; return_max_logit is given.
        TypeError: an option is unknown.
        ValueError: an argument is none of what it may be; heads do not divide.
    """

    softmax_offset: Tensor

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        *,
        tp_size: int = 1,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: Any = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
        name: str | None = None,
        **tuning: Any,
    ) -> None:
        super().__init__(name)
        plain("DotProductAttention", tuning)
        refuse_parallel("DotProductAttention", tp_group, tp_size)
        self.set_context_parallel_group(cp_group)
        if return_max_logit:
            refuse("return_max_logit", "is for training", "leave it out")
        if softmax_type not in ("vanilla", "off-by-one", "learnable"):
            raise ValueError(f"softmax_type is {softmax_type!r}")
        if attention_type not in ("self", "cross"):
            raise ValueError(f"attention_type is {attention_type!r}; it is self or cross")
        self.num_attention_heads = num_attention_heads
        self.num_gqa_groups = num_gqa_groups or num_attention_heads
        if num_attention_heads % self.num_gqa_groups:
            raise ValueError(f"{num_attention_heads} heads do not fit {num_gqa_groups} of keys")
        widths = (kv_channels,) * 2 if isinstance(kv_channels, int) else kv_channels
        self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v = widths
        self.attention_dropout = attention_dropout
        self.qkv_format = qkv_format
        self.attn_mask_type = mask_name(attn_mask_type)
        self.window_size = window_of(self.attn_mask_type, window_size)
        self.bottom_right_diagonal = bottom_right_diagonal
        self.attention_type = attention_type
        self.softmax_scale = widths[0] ** -0.5 if softmax_scale is None else softmax_scale
        self.softmax_type = softmax_type
        self.fused_attention = FusedAttention()
        if softmax_type == "learnable":
            self.add_parameter("softmax_offset", (num_attention_heads,), nn.init.zeros_, None, None)

    def forward(
        self,
        query_layer: Tensor | None = None,
        key_layer: Tensor | None = None,
        value_layer: Tensor | None = None,
        attention_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: Any = None,
        max_seqlen_kv: Any = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: Any = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool | None = False,
        bf16_backward: bool | None = False,
        num_splits: int | None = 1,
        score_mod: Any = None,
        qkv_layer: Tensor | None = None,
        kv_layer: Tensor | None = None,
        qkv_interleave_dim: int = -3,
    ) -> Tensor:
        """Attention of one tensor to another.

        Args:
            query_layer: (s, b, h, d), (b, s, h, d) or (t, h, d), by the format.
            key_layer: the same, of as many heads as there are of keys.
            value_layer: the same, of e channels.
            attention_mask: bool, True where nothing is seen. For padding (b, 1, 1, s) for both, or
                a pair with that of keys; for "arbitrary" what broadcasts over (b, h, s, s).
            qkv_format: None for the layer's own, as are the other four that it has, too.
            cu_seqlens_q: (b + 1,), int32, the sum of the lengths before each sequence, and of all;
                for "thd", or as the mask of padding.
            cu_seqlens_kv: the same, of keys.
            cu_seqlens_q_padded: the same with the padding that follows each sequence in "thd".
            cu_seqlens_kv_padded: the same, of keys.
            max_seqlen_q: not needed here.
            max_seqlen_kv: not needed here.
            core_attention_bias_type: "no_bias", "pre_scale_bias", "post_scale_bias" or "alibi".
            core_attention_bias: broadcasts over (b, h, s, s).
            alibi_slopes: (h,) or (b, h); None for those of Press et al.
            inference_params: must be None.
            score_mod: must be None.
            qkv_layer: all three in one tensor, in the place of them.
            kv_layer: keys and values in one tensor, in the place of these.
            qkv_interleave_dim: which dimension of these is of the 3 or 2 of them.

        Returns:
            (s, b, h·e), (b, s, h·e) or (t, h·e).

        Raises:
            NotImplementedError: a cache of keys, score_mod, or a bias of "thd".
            ValueError: arguments do not go together.
        """
        if inference_params is not None:
            refuse_cache()
        if score_mod is not None:
            refuse(
                "score_mod", "is a graph of cuDNN", "give the bias, or use torch's flex_attention"
            )
        if qkv_layer is not None:
            query_layer, key_layer, value_layer = qkv_layer.unbind(qkv_interleave_dim)
        elif kv_layer is not None:
            key_layer, value_layer = kv_layer.unbind(qkv_interleave_dim)
        if query_layer is None or key_layer is None or value_layer is None:
            raise ValueError("DotProductAttention: queries, keys and values are needed")
        order = self.qkv_format if qkv_format is None else qkv_format
        if order not in _FORMATS:
            raise ValueError(f"qkv_format is {order!r}; it is one of {', '.join(_FORMATS)}")
        self._check(query_layer, key_layer, value_layer, order)
        kind = self.attn_mask_type if attn_mask_type is None else mask_name(attn_mask_type)
        window = window_of(kind, self.window_size if window_size is None else window_size)
        if bottom_right_diagonal is None:
            bottom_right_diagonal = self.bottom_right_diagonal
        from_end = is_from_end(kind, bottom_right_diagonal)
        options = self._options(window, core_attention_bias_type, core_attention_bias, alibi_slopes)
        if order == "thd":
            of_q, of_k = (cu_seqlens_q, cu_seqlens_q_padded), (cu_seqlens_kv, cu_seqlens_kv_padded)
            return self._packed(
                query_layer, key_layer, value_layer, of_q, of_k, kind, from_end, options
            )
        into = (1, 2, 0, 3) if order == "sbhd" else (0, 2, 1, 3)
        q, k, v = (t.permute(into) for t in (query_layer, key_layer, value_layer))
        if "padding" in kind and attention_mask is None and cu_seqlens_q is not None:
            attention_mask = padding_of(cu_seqlens_q, q.shape[2])
            if cu_seqlens_kv is not None:
                attention_mask = attention_mask, padding_of(cu_seqlens_kv, k.shape[2])
        where = places(q, k, kind, attention_mask, from_end)
        ends_together = window[1] < 0 or always(q.shape[2] == k.shape[2])
        if where.allowed is None and options.is_plain and ends_together:
            out = attend(q, k, v, None, options)
        else:
            out = attend(q, k, v, where, options)
        back = (2, 0, 1, 3) if order == "sbhd" else (0, 2, 1, 3)
        return out.permute(back).flatten(2)

    def _packed(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        of_q: tuple[Tensor | None, Tensor | None],
        of_k: tuple[Tensor | None, Tensor | None],
        kind: str,
        from_end: bool,
        options: Options,
    ) -> Tensor:
        """(t, h, d) → (t, h·e)."""
        if "padding" not in kind:
            raise ValueError(f"attn_mask_type is {kind} for thd; it is one of padding")
        if of_q[0] is None or of_k[0] is None:
            raise ValueError("cu_seqlens_q and cu_seqlens_kv are needed for thd")
        where = packed_places(q, k, (of_q[0], of_q[1]), (of_k[0], of_k[1]), from_end)
        if options.bias is not None or (options.slopes is not None and options.slopes.dim() > 1):
            refuse("thd with a bias of each sequence", "has kernels of cuDNN", "use bshd or sbhd")
        q, k, v = (t[None].transpose(1, 2) for t in (q, k, v))
        return attend(q, k, v, where, options)[0].transpose(0, 1).flatten(1)

    def _options(
        self, window: tuple[int, int], kind: str, bias: Tensor | None, slopes: Tensor | None
    ) -> Options:
        if kind not in _BIASES:
            raise ValueError(f"core_attention_bias_type is {kind!r}; it is one of {_BIASES}")
        if (bias is None) == kind.endswith("scale_bias") or (slopes is not None) > (
            kind == "alibi"
        ):
            raise ValueError(f"a bias or slopes do not fit core_attention_bias_type {kind}")
        if kind == "alibi" and slopes is None:
            slopes = slopes_of(self.num_attention_heads)
        sink = None
        if self.softmax_type == "learnable":
            sink = self.softmax_offset
        elif self.softmax_type == "off-by-one":
            sink = torch.zeros(self.num_attention_heads)
        dropout = self.attention_dropout if self.training else 0.0
        scaled = kind == "pre_scale_bias"
        return Options(self.softmax_scale, window, dropout, bias, scaled, slopes, sink)

    def _check(self, q: Tensor, k: Tensor, v: Tensor, order: str) -> None:
        shapes = f"queries are {tuple(q.shape)}, keys {tuple(k.shape)}, values {tuple(v.shape)}"
        if not q.dim() == k.dim() == v.dim() == len(order):
            raise ValueError(f"DotProductAttention: {order} has {len(order)} dimensions; {shapes}")
        width = self.hidden_size_per_attention_head_k
        fits = k.shape[-2] == v.shape[-2] == self.num_gqa_groups and q.shape[-1] == k.shape[-1]
        if not fits or q.shape[-1] != width or v.shape[-1] != self.hidden_size_per_attention_head_v:
            raise ValueError(f"DotProductAttention: heads or channels do not fit: {shapes}")
