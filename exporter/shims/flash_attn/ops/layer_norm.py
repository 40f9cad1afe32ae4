"""Layer norms of a sum with a residual, as the package's extension for them computes them."""

from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from .triton.layer_norm import layer_norm_fn

__all__ = [
    "DropoutAddLayerNorm",
    "NormOfSum",
    "dropout_add_layer_norm",
    "dropout_add_layer_norm_parallel_residual",
    "dropout_add_layer_norm_subset",
    "layer_norm",
    "parallel_residual",
    "refuse_subset",
    "residual_norm",
]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """The layer norm over the last dimension, in x's dtype."""
    out: Tensor = layer_norm_fn(x, weight, bias, eps=epsilon)
    return out


def dropout_add_layer_norm(
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
    """The norm of `dropout(x0 · rowscale) · layerscale + residual`, in float32 at least.

    Args:
        x0: (…, d).
        residual: x0's shape, or None; its dtype is that of the sum that is returned.
        weight: (d,).
        bias: (d,), or None.
        dropout_p: of x0; above 0 it is always done.
        epsilon: under the root.
        rowscale: (…), of each row of x0, or None.
        layerscale: (d,), of each channel of x0, or None.
        prenorm: whether the sum is returned too.
        residual_in_fp32: the sum is float32 where there is no residual to tell its dtype.
        return_dropout_mask: not supported.

    Returns:
        The norm in x0's dtype; then the sum, if `prenorm`.

    Raises:
        NotImplementedError: return_dropout_mask is True.
    """
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
        is_rms_norm=False,
    )


def dropout_add_layer_norm_parallel_residual(
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
    """Two norms of `dropout(x0) + dropout(x1) + residual`; the second is None without a weight1.

    Returns:
        The norms in x0's dtype; then the sum, if `prenorm`.

    Raises:
        NotImplementedError: return_dropout_mask is True.
    """
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
        is_rms_norm=False,
    )


def dropout_add_layer_norm_subset(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuses: rows that are left out are not supported."""
    refuse_subset("dropout_add_layer_norm_subset")


class NormOfSum(nn.Module):
    """A norm of x0 and a residual.

    Args:
        hidden_size: the last dimension.
        prenorm: whether the sum is returned too.
        p: the probability of dropout of x0, in training.
        eps: under the root.
        residual_in_fp32: the sum is float32 where there is no residual to tell its dtype.
    """

    is_rms_norm: ClassVar[bool]
    bias: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        prenorm: bool = False,
        p: float = 0.0,
        eps: float = 1e-5,
        residual_in_fp32: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.prenorm = prenorm
        self.p = p
        self.eps = eps
        self.residual_in_fp32 = residual_in_fp32
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        has_bias = not self.is_rms_norm
        bias = nn.Parameter(torch.zeros_like(self.weight)) if has_bias else None
        self.register_parameter("bias", bias)

    def reset_parameters(self) -> None:
        """Ones, and zeros of the bias."""
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x0: Tensor, residual: Tensor | None = None) -> Any:
        """The norm of (…, hidden_size), and the sum if `prenorm`."""
        return residual_norm(
            x0,
            residual,
            self.weight,
            self.bias,
            self.p if self.training else 0.0,
            self.eps,
            prenorm=self.prenorm,
            residual_in_fp32=self.residual_in_fp32,
            is_rms_norm=self.is_rms_norm,
        )


class DropoutAddLayerNorm(NormOfSum):
    """A layer norm of x0 and a residual; see `NormOfSum`."""

    is_rms_norm = False


def residual_norm(
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
    *,
    is_rms_norm: bool,
) -> Any:
    """`dropout_add_layer_norm`, with the mean or without."""
    return layer_norm_fn(
        x0 if layerscale is None else x0 * layerscale.to(x0.dtype),
        weight,
        bias,
        residual,
        eps=epsilon,
        dropout_p=dropout_p,
        rowscale=rowscale,
        prenorm=prenorm,
        residual_in_fp32=residual_in_fp32,
        is_rms_norm=is_rms_norm,
        return_dropout_mask=return_dropout_mask,
    )


def parallel_residual(
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
    *,
    is_rms_norm: bool,
) -> Any:
    """`dropout_add_layer_norm_parallel_residual`, with the mean or without."""
    found = layer_norm_fn(
        x0,
        weight0,
        bias0,
        residual,
        x1,
        weight1,
        bias1,
        eps=epsilon,
        dropout_p=dropout_p,
        prenorm=prenorm,
        residual_in_fp32=residual_in_fp32,
        is_rms_norm=is_rms_norm,
        return_dropout_mask=return_dropout_mask,
    )
    if weight1 is not None:
        return found
    return (found[0], None, found[1]) if prenorm else (found, None)


def refuse_subset(name: str) -> NoReturn:
    """Raises NotImplementedError."""
    raise NotImplementedError(
        f"{name} was called on fuseport's stand-in for flash_attn, which leaves out no rows"
    )
