"""Norms that add a residual first, as the blocks of Mamba call them; RMS norms by the op."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuseport.ops.rms_norm import rms_norm

__all__ = ["RMSNorm", "layer_norm_fn", "layer_norm_ref", "rms_norm_fn", "rms_norm_ref"]


class RMSNorm(nn.Module):
    """An RMS norm over the last dimension, with an optional residual.

    Args:
        hidden_size: the last dimension.
        eps: under the root.
        dropout_p: of the input, in training.
    """

    bias: None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        dropout_p: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.drop = nn.Dropout(dropout_p) if dropout_p > 0.0 else None
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Ones."""
        nn.init.ones_(self.weight)

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
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
) -> Any:
    """The norm of `dropout(x · rowscale) + dropout(x1) + residual`, in float32 at least.

    Args:
        x: (…, d).
        weight: (d,).
        bias: (d,), or None.
        residual: x's shape, or None; its dtype is that of the sum that is returned.
        x1: x's shape, or None.
        weight1: (d,) of a second norm of the same sum, or None.
        bias1: (d,) of it, or None.
        eps: under the root.
        dropout_p: of x and x1; above 0 it is always done.
        rowscale: (…), of each row of x, or None.
        prenorm: whether the sum is returned too.
        residual_in_fp32: the sum is float32 where there is no residual to tell its dtype.
        is_rms_norm: without the mean.
        return_dropout_mask: not supported.

    Returns:
        The norm in x's dtype; then the second norm, if any; then the sum, if `prenorm`.

    Raises:
        NotImplementedError: return_dropout_mask is True.
    """
    if return_dropout_mask:
        raise NotImplementedError("fuseport's stand-in of layer_norm_fn returns no dropout masks")
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    kept = wide if residual_in_fp32 else x.dtype
    total = x.to(wide)
    if rowscale is not None:
        total = total * rowscale[..., None].to(wide)
    if dropout_p > 0.0:
        total = F.dropout(total, dropout_p)
    if x1 is not None:
        total = total + (F.dropout(x1, dropout_p) if dropout_p > 0.0 else x1).to(wide)
    if residual is not None:
        kept = residual.dtype
        total = total + residual.to(wide)
    outputs = [_normalised(total, weight, bias, eps, is_rms_norm).to(x.dtype)]
    if weight1 is not None:
        outputs.append(_normalised(total, weight1, bias1, eps, is_rms_norm).to(x.dtype))
    if prenorm:
        outputs.append(total.to(kept))
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


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
    return_dropout_mask: bool = False,
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
        True,
        return_dropout_mask,
    )


def layer_norm_ref(x: Tensor, weight: Tensor, bias: Tensor | None, **options: Any) -> Any:
    """`layer_norm_fn`; whether to compute wider, `upcast`, is not asked here."""
    options.pop("upcast", None)
    return layer_norm_fn(x, weight, bias, **options)


def rms_norm_ref(x: Tensor, weight: Tensor, bias: Tensor | None, **options: Any) -> Any:
    """`rms_norm_fn`; whether to compute wider, `upcast`, is not asked here."""
    options.pop("upcast", None)
    return rms_norm_fn(x, weight, bias, **options)


def _normalised(
    total: Tensor, weight: Tensor, bias: Tensor | None, eps: float, is_rms_norm: bool
) -> Tensor:
    weight = weight.to(total.dtype)
    bias = None if bias is None else bias.to(total.dtype)
    if not is_rms_norm:
        return F.layer_norm(total, weight.shape, weight, bias, eps)
    out = rms_norm(total, weight, eps)
    return out if bias is None else out + bias
