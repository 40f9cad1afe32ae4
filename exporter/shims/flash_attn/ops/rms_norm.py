"""RMS norms, with a residual or without, over the registered op."""

from typing import Any

import torch
from torch import Tensor, nn

from .layer_norm import NormOfSum, parallel_residual, refuse_subset, residual_norm
from .triton.layer_norm import rms_norm_fn

__all__ = [
    "DropoutAddRMSNorm",
    "RMSNorm",
    "dropout_add_rms_norm",
    "dropout_add_rms_norm_parallel_residual",
    "dropout_add_rms_norm_subset",
    "rms_norm",
]


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x · weight / √(mean(x²) + epsilon) over the last dimension, in x's dtype."""
    out: Tensor = rms_norm_fn(x, weight, None, eps=epsilon)
    return out


class RMSNorm(nn.Module):
    """An RMS norm over the last dimension.

    Args:
        hidden_size: the last dimension.
        eps: under the root.
    """

    bias: None

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Ones."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(…, hidden_size) → the same."""
        return rms_norm(x, self.weight, self.eps)


def dropout_add_rms_norm(
    x0: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    epsilon: float,
    rowscale: Tensor | None = None,
    layerscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Any:
    """`dropout_add_layer_norm` without the mean."""
    return residual_norm(
        x0,
        residual,
        weight,
        bias,
        dropout_p,
        epsilon,
        rowscale,
        layerscale,
        prenorm,
        residual_in_fp32,
        return_dropout_mask,
        is_rms_norm=True,
    )


def dropout_add_rms_norm_parallel_residual(
    x0: Tensor,
    x1: Tensor | None,
    residual: Tensor | None,
    weight0: Tensor,
    bias0: Tensor | None,
    weight1: Tensor | None,
    bias1: Tensor | None,
    dropout_p: float,
    epsilon: float,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Any:
    """`dropout_add_layer_norm_parallel_residual` without the mean."""
    return parallel_residual(
        x0,
        x1,
        residual,
        weight0,
        bias0,
        weight1,
        bias1,
        dropout_p,
        epsilon,
        prenorm,
        residual_in_fp32,
        return_dropout_mask,
        is_rms_norm=True,
    )


def dropout_add_rms_norm_subset(*args: Any, **kwargs: Any) -> Any:
    """Refuses: rows that are left out are not supported."""
    refuse_subset("dropout_add_rms_norm_subset")


class DropoutAddRMSNorm(NormOfSum):
    """`DropoutAddLayerNorm` without the mean, and without a bias."""

    is_rms_norm = True
