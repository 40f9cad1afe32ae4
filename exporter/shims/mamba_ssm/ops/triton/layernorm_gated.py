"""Norms with a gate, as Mamba-2 ends a mixer; those of the root mean square by the ops."""

from typing import Any

import torch
from torch import Tensor, nn

from fuseport.exporter.shims._norms import layernorm_fn, rmsnorm_fn

__all__ = ["LayerNorm", "RMSNorm", "layernorm_fn", "rms_norm_ref", "rmsnorm_fn"]


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
