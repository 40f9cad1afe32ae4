"""The layer of a transformer."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuseport.exporter.shims._dtypes import wide

from ._compute import autocast_dtype
from ._refused import plain, refuse_parallel
from .attention import MultiheadAttention
from .module import LayerNorm, LayerNormMLP, RMSNorm
from .module.base import Init

__all__ = ["TransformerLayer"]


class DropPath(nn.Module):
    """Leaves the residual branch out, in training, for some of the first dimension at random."""

    def __init__(self, drop_prob: float = 0.0) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, hidden_state: Tensor) -> Tensor:
        """(n, …) → the same."""
        if not self.training or self.drop_prob == 0.0:
            return hidden_state
        kept = 1.0 - self.drop_prob
        one_each = (hidden_state.shape[0], *[1] * (hidden_state.dim() - 1))
        return hidden_state / kept * torch.rand(one_each).add(kept).floor().to(hidden_state)


class TransformerLayer(nn.Module):
    """Attention, to another sequence also in a decoder, and an MLP, with their residuals.

    Args:
        hidden_size: of input and output.
        ffn_hidden_size: of the MLP.
        num_attention_heads: of queries.
        num_gqa_groups: heads of keys and values; None for as many.
        layernorm_epsilon: under the norms' roots.
        hidden_dropout: the part of what is added that is left out at random, in training.
        attention_dropout: the part of attention's weights that is.
        init_method: initial values of first weights; None for a normal distribution.
        output_layer_init_method: initial values of last weights, as init_method.
        layer_number: has no effect.
        kv_channels: of a head; None for hidden_size / num_attention_heads.
        self_attn_mask_type: as `DotProductAttention` has it, with the next two.
        enc_dec_attn_mask_type: the same, of a decoder's attention to another sequence.
        enc_dec_window_size: of it.
        enc_dec_bottom_right_diagonal: of it.
        tp_group: the processes that it is divided among, one at most, or None.
        tp_size: how many without a group.
        params_dtype: of the parameters; None for torch's default.
        apply_residual_connection_post_layernorm: whether norms are added, and not what they are of.
        output_layernorm: whether there is a norm at the end, and none before attention.
        parallel_attention_mlp: whether the MLP has the input of attention, and both are added.
        layer_type: "encoder" or "decoder".
        drop_path_rate: for how many of the first dimension nothing is added, in training.
        set_parallel_mode: whether last biases are added to rounded products.
        fuse_qkv_params: as `MultiheadAttention` has it, as are other arguments of its name.
        bias: whether linear layers have one.
        activation: as `LayerNormMLP` has it, with activation_params.
        attn_input_format: the order of dimensions, `MultiheadAttention`'s qkv_format.
        name: has no effect.
        tuning: options that have no effect.

    Raises:
        NotImplementedError: there is more than one process.
        TypeError: an option is unknown.
        ValueError: arguments do not go together.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: Init | None = None,
        output_layer_init_method: Init | None = None,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        *,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_bottom_right_diagonal: bool | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        params_dtype: torch.dtype | None = None,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: str = "encoder",
        drop_path_rate: float = 0.0,
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        rotary_pos_interleaved: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        bias: bool = True,
        activation: str = "gelu",
        activation_params: Mapping[str, Any] | None = None,
        normalization: str = "LayerNorm",
        device: Any = None,
        attn_input_format: str = "sbhd",
        name: str | None = None,
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        softmax_type: str = "vanilla",
        **tuning: Any,
    ) -> None:
        super().__init__()
        plain("TransformerLayer", tuning)
        refuse_parallel("TransformerLayer", tp_group, tp_size)
        if layer_type not in ("encoder", "decoder"):
            raise ValueError(f"layer_type is {layer_type!r}; it is encoder or decoder")
        post = apply_residual_connection_post_layernorm
        if parallel_attention_mlp and (layer_type == "decoder" or post or output_layernorm):
            raise ValueError(
                "parallel_attention_mlp is of encoders without a norm at the end, and without "
                "apply_residual_connection_post_layernorm"
            )
        self.self_attn_mask_type = self_attn_mask_type
        self.window_size = window_size
        self.bottom_right_diagonal = bottom_right_diagonal
        self.enc_dec_attn_mask_type = enc_dec_attn_mask_type
        self.enc_dec_window_size = enc_dec_window_size
        self.enc_dec_bottom_right_diagonal = enc_dec_bottom_right_diagonal
        self.layer_number = layer_number
        self.layer_type = layer_type
        self.apply_residual_connection_post_layernorm = post
        self.output_layernorm = output_layernorm
        self.parallel_attention_mlp = parallel_attention_mlp
        self.hidden_dropout = hidden_dropout
        self.kv_channels = kv_channels or hidden_size // num_attention_heads
        made = {"params_dtype": params_dtype, "device": device}
        alike: dict[str, Any] = {
            **made,
            "init_method": init_method,
            "output_layer_init_method": output_layer_init_method,
            "bias": bias,
            "normalization": normalization,
            "zero_centered_gamma": zero_centered_gamma,
            "return_layernorm_output": post,
            "set_parallel_mode": set_parallel_mode,
        }
        of_attention: dict[str, Any] = {
            **alike,
            "kv_channels": self.kv_channels,
            "attention_dropout": attention_dropout,
            "layernorm_epsilon": layernorm_epsilon,
            "num_gqa_groups": num_gqa_groups,
            "fuse_qkv_params": fuse_qkv_params,
            "qkv_weight_interleaved": qkv_weight_interleaved,
            "rotary_pos_interleaved": rotary_pos_interleaved,
            "qkv_format": attn_input_format,
            "qk_norm_type": qk_norm_type,
            "qk_norm_eps": qk_norm_eps,
            "qk_norm_before_rope": qk_norm_before_rope,
            "softmax_type": softmax_type,
        }
        self.self_attention = MultiheadAttention(
            hidden_size,
            num_attention_heads,
            input_layernorm=not output_layernorm,
            return_bias=not parallel_attention_mlp,
            **of_attention,
        )
        if layer_type == "decoder":
            self.inter_attention = MultiheadAttention(
                hidden_size,
                num_attention_heads,
                attn_mask_type=enc_dec_attn_mask_type,
                input_layernorm=True,
                attention_type="cross",
                return_bias=True,
                **of_attention,
            )
        self.layernorm_mlp = LayerNormMLP(
            hidden_size,
            ffn_hidden_size,
            layernorm_epsilon,
            return_bias=not parallel_attention_mlp,
            activation=activation,
            activation_params=activation_params,
            **alike,
        )
        self.drop_path = DropPath(drop_path_rate) if drop_path_rate > 0.0 else None
        if output_layernorm:
            norm = LayerNorm if normalization == "LayerNorm" else RMSNorm
            self.layernorm = norm(
                hidden_size, layernorm_epsilon, zero_centered_gamma=zero_centered_gamma, **made
            )

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Refuses a group of more than one process."""
        refuse_parallel("TransformerLayer", tp_group, 1)

    def set_context_parallel_group(self, cp_group: Any, *args: Any, **kwargs: Any) -> None:
        """Refuses a group of more than one process."""
        self.self_attention.set_context_parallel_group(cp_group)

    def reset_fp8_meta_tensors(self) -> None:
        """Nothing: there are no scales."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        self_attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        encoder_output: Tensor | None = None,
        enc_dec_attn_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        enc_dec_bottom_right_diagonal: bool | None = None,
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
    ) -> Tensor:
        """(s, b, hidden_size), (b, s, hidden_size) or (t, hidden_size) → the same.

        Arguments are as `MultiheadAttention.forward` has them; those of keys, and those that begin
        with enc_dec, are of a decoder's attention to encoder_output.
        """
        dtype = autocast_dtype(hidden_states)
        hidden_states = hidden_states if dtype is None else hidden_states.to(dtype)
        of_both: dict[str, Any] = {
            "inference_params": inference_params,
            "rotary_pos_emb": rotary_pos_emb,
            "core_attention_bias_type": core_attention_bias_type,
            "core_attention_bias": core_attention_bias,
            "alibi_slopes": alibi_slopes,
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_q_padded": cu_seqlens_q_padded,
            "pad_between_seqs": pad_between_seqs,
        }
        attended = self.self_attention(
            hidden_states,
            attention_mask,
            attn_mask_type=self_attn_mask_type or self.self_attn_mask_type,
            window_size=window_size or self.window_size,
            bottom_right_diagonal=_first(bottom_right_diagonal, self.bottom_right_diagonal),
            cu_seqlens_kv=cu_seqlens_q,
            cu_seqlens_kv_padded=cu_seqlens_q_padded,
            **of_both,
        )
        if self.parallel_attention_mlp:
            mlp = self.layernorm_mlp(hidden_states)
            return self._added(attended, mlp, hidden_states, self.drop_path)
        hidden_states = self._with_residual(attended, hidden_states, self.drop_path)
        if self.layer_type == "decoder":
            attended = self.inter_attention(
                hidden_states,
                enc_dec_attn_mask,
                encoder_output,
                attn_mask_type=enc_dec_attn_mask_type or self.enc_dec_attn_mask_type,
                window_size=enc_dec_window_size or self.enc_dec_window_size,
                bottom_right_diagonal=_first(
                    enc_dec_bottom_right_diagonal, self.enc_dec_bottom_right_diagonal
                ),
                cu_seqlens_kv=cu_seqlens_kv,
                cu_seqlens_kv_padded=cu_seqlens_kv_padded,
                **of_both,
            )
            hidden_states = self._with_residual(attended, hidden_states, None)
        mlp = self.layernorm_mlp(hidden_states)
        hidden_states = self._with_residual(mlp, hidden_states, self.drop_path)
        return self.layernorm(hidden_states) if self.output_layernorm else hidden_states

    def _with_residual(
        self, parts: tuple[Any, ...], x: Tensor, drop_path: DropPath | None
    ) -> Tensor:
        """What a layer returned, with its bias, added to x, or to its norm where it returned it."""
        out, bias, *norm = parts
        return self._added(out, bias, norm[0] if norm else x, drop_path)

    def _added(
        self, out: Tensor, bias: Tensor | None, residual: Tensor, drop_path: DropPath | None
    ) -> Tensor:
        """residual + dropout(out + bias), rounded once where there is a bias and no drop_path."""
        real = residual.dtype
        if drop_path is None and bias is not None:
            real = wide(residual)
        moved = out.to(real) if bias is None else out.to(real) + bias.to(real)
        moved = F.dropout(moved, self.hidden_dropout, self.training)
        moved = moved if drop_path is None else drop_path(moved)
        return (residual.to(real) + moved).to(residual.dtype)


def _first(given: bool | None, own: bool | None) -> bool | None:
    return own if given is None else given
