"""The block around a layer: add to the residual stream, norm, layer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.triton.layer_norm import RMSNorm, layer_norm_fn
from ._initial import wide

__all__ = ["Block"]


class Block(nn.Module):
    """Adds, normalises and mixes, in this order; the residual stream is passed on beside.

    Args:
        dim: width of the residual stream.
        mixer_cls: width → the layer.
        mlp_cls: width → an MLP after it; `nn.Identity` for none.
        norm_cls: width → the norm.
        fused_add_norm: addition and norm are one function, which computes in float32.
        residual_in_fp32: the residual stream is float32.

    Raises:
        ValueError: fused_add_norm with another norm than LayerNorm or RMSNorm.
    """

    def __init__(
        self,
        dim: int,
        mixer_cls: Callable[[int], nn.Module],
        mlp_cls: Callable[[int], nn.Module],
        norm_cls: Callable[[int], nn.Module] = nn.LayerNorm,
        fused_add_norm: bool = False,
        residual_in_fp32: bool = False,
    ) -> None:
        super().__init__()
        self.residual_in_fp32 = residual_in_fp32
        self.fused_add_norm = fused_add_norm
        self.norm: Any = norm_cls(dim)
        self.mixer: Any = mixer_cls(dim)
        self.mlp = None
        if mlp_cls is not nn.Identity:
            self.norm2: Any = norm_cls(dim)
            self.mlp = mlp_cls(dim)
        if fused_add_norm and not isinstance(self.norm, nn.LayerNorm | RMSNorm):
            raise ValueError("fused_add_norm takes LayerNorm and RMSNorm only")

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor | None = None,
        inference_params: Any = None,
        **mixer_kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """(b, l, dim), and the residual stream or None → both, for the next block."""
        hidden_states, residual = self._normed(self.norm, hidden_states, residual)
        hidden_states = self.mixer(hidden_states, inference_params=inference_params, **mixer_kwargs)
        if self.mlp is not None:
            hidden_states, residual = self._normed(self.norm2, hidden_states, residual)
            hidden_states = self.mlp(hidden_states)
        return hidden_states, residual

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> Any:
        """The layer's."""
        return self.mixer.allocate_inference_cache(batch_size, max_seqlen, dtype=dtype, **kwargs)

    def _normed(
        self, norm: Any, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if self.fused_add_norm:
            normed, total = layer_norm_fn(
                hidden_states,
                norm.weight,
                norm.bias,
                residual,
                prenorm=True,
                residual_in_fp32=self.residual_in_fp32,
                eps=norm.eps,
                is_rms_norm=isinstance(norm, RMSNorm),
            )
            return normed, total
        total = hidden_states if residual is None else hidden_states + residual
        normed = norm(total.to(norm.weight.dtype))
        return normed, wide(total) if self.residual_in_fp32 else total
