"""Norms that add a residual first: those of the stand-in for mamba_ssm, with a few more options."""

from typing import Any

import torch
from torch import Tensor, nn

from fuseport.exporter.shims.mamba_ssm.ops.triton import layer_norm as without

__all__ = ["RMSNorm", "layer_norm_fn", "layer_norm_ref", "rms_norm_fn", "rms_norm_ref"]


class RMSNorm(without.RMSNorm):
    """An RMS norm over the last dimension, with an optional residual.

    Args:
        hidden_size: the last dimension.
        eps: under the root.
        dropout_p: of the input, in training.
        zero_centered_weight: whether 1 is added to the weight, which then begins as zeros.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        dropout_p: float = 0.0,
        zero_centered_weight: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.zero_centered_weight = zero_centered_weight
        super().__init__(hidden_size, eps, dropout_p, device, dtype)

    def reset_parameters(self) -> None:
        """What makes the factor 1."""
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_weight else 1.0)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Any:
        """`rms_norm_fn` with this norm's weight; dropout in training only."""
        return rms_norm_fn(
            x,
            self.weight,
            None,
            residual=residual,
            eps=self.eps,
            dropout_p=self.drop.p if self.drop is not None and self.training else 0.0,
            prenorm=prenorm,
            residual_in_fp32=residual_in_fp32,
            zero_centered_weight=self.zero_centered_weight,
        )


def layer_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Any:
    """`layer_norm_fn` of the stand-in for mamba_ssm, with these arguments more.

    Args:
        zero_centered_weight: whether 1 is added to both weights.
        out_dtype: None, or x's.
        out: must be None.
        residual_out: must be None.

    Raises:
        NotImplementedError: return_dropout_mask is True, a tensor to write to is given, or
            out_dtype is another one.
    """
    if out is not None or residual_out is not None:
        raise NotImplementedError("fuseport's stand-in of layer_norm_fn writes to no given tensors")
    if out_dtype not in (None, x.dtype):
        raise NotImplementedError("fuseport's stand-in of layer_norm_fn returns norms in x's dtype")
    if zero_centered_weight:
        weight, weight1 = weight + 1.0, None if weight1 is None else weight1 + 1.0
    return without.layer_norm_fn(
        x,
        weight,
        bias,
        residual,
        x1,
        weight1,
        bias1,
        eps,
        dropout_p,
        rowscale,
        prenorm,
        residual_in_fp32,
        is_rms_norm,
        return_dropout_mask,
    )


def rms_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Any:
    """`layer_norm_fn` without the mean."""
    return layer_norm_fn(
        x,
        weight,
        bias,
        residual,
        x1,
        weight1,
        bias1,
        eps,
        dropout_p,
        rowscale,
        prenorm,
        residual_in_fp32,
        zero_centered_weight,
        True,
        return_dropout_mask,
        out_dtype,
        out,
        residual_out,
    )


def layer_norm_ref(x: Tensor, weight: Tensor, bias: Tensor | None, **options: Any) -> Any:
    """`layer_norm_fn`; whether to compute wider, `upcast`, is not asked here."""
    options.pop("upcast", None)
    return layer_norm_fn(x, weight, bias, **options)


def rms_norm_ref(x: Tensor, weight: Tensor, bias: Tensor | None, **options: Any) -> Any:
    """`rms_norm_fn`; whether to compute wider, `upcast`, is not asked here."""
    options.pop("upcast", None)
    return rms_norm_fn(x, weight, bias, **options)
