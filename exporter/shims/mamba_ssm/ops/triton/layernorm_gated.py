"""Norms with a gate, as Mamba-2 ends a mixer; those of the root mean square by the ops."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuseport.ops.rms_norm import rms_norm
from fuseport.ops.rms_norm_gated import rms_norm_gated

__all__ = ["LayerNorm", "RMSNorm", "layernorm_fn", "rms_norm_ref", "rmsnorm_fn"]


def layernorm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
) -> Tensor:
    """norm(x)·SiLU(z), or norm(x·SiLU(z)) where the norm is not before the gate.

    Args:
        x: (…, d).
        weight: (d,).
        bias: (d,), added before a gate that follows, or None.
        z: like x, or None for no gate.
        eps: under the root.
        group_size: how many channels share mean and variance; None for all.
        norm_before_gate: which of the two.
        is_rms_norm: without the mean.
    """
    weight = _fitting(weight, x)
    if is_rms_norm and bias is None and z is not None:
        return rms_norm_gated(x, z, weight, eps, group_size, norm_before_gate)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    value = x.to(wide)
    if z is not None and not norm_before_gate:
        value = value * F.silu(z.to(wide))
    if is_rms_norm:
        value = rms_norm(value, weight.to(wide), eps, group_size)
    else:
        groups = value.unflatten(-1, (-1, group_size or value.shape[-1]))
        normal = F.layer_norm(groups, groups.shape[-1:], eps=eps).flatten(-2)
        value = normal * weight.to(wide)
    if bias is not None:
        value = value + bias.to(wide)
    if z is not None and norm_before_gate:
        value = value * F.silu(z.to(wide))
    return value.to(x.dtype)


def rmsnorm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
) -> Tensor:
    """`layernorm_fn` without the mean."""
    return layernorm_fn(x, weight, bias, z, eps, group_size, norm_before_gate, True)


def rms_norm_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    upcast: bool = True,
) -> Tensor:
    """`rmsnorm_fn`, which always computes in float32 at least."""
    return rmsnorm_fn(x, weight, bias, z, eps, group_size, norm_before_gate)


class LayerNorm(nn.Module):
    """A layer norm with an optional gate; see `layernorm_fn`.

    Args:
        hidden_size: d.
        eps: under the root.
        group_size: how many channels share mean and variance; None for all.
        norm_before_gate: norm(x)·SiLU(z), not norm(x·SiLU(z)).
    """

    _is_rms_norm = False

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.group_size = group_size
        self.norm_before_gate = norm_before_gate
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.bias = None if self._is_rms_norm else nn.Parameter(torch.empty_like(self.weight))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Ones, and zeros of the bias."""
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """The norm of x, (…, d), gated by z if it is given."""
        return layernorm_fn(
            x,
            self.weight,
            self.bias,
            z,
            self.eps,
            self.group_size,
            self.norm_before_gate,
            self._is_rms_norm,
        )


class RMSNorm(LayerNorm):
    """An RMS norm with an optional gate, without a bias; arguments as of `LayerNorm`."""

    _is_rms_norm = True


def _fitting(weight: Tensor, x: Tensor) -> Tensor:
    """The weight in a dtype that the ops take beside x: x's, or float32 beside a half type."""
    half = x.dtype in (torch.float16, torch.bfloat16)
    return weight if half and weight.dtype == torch.float32 else weight.to(x.dtype)
