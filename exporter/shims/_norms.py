"""Norms of groups of channels with a gate, by the ops where they are of the root mean square."""

import torch.nn.functional as F
from torch import Tensor

from fuseport.exporter.shims._dtypes import beside, wide
from fuseport.ops.rms_norm import rms_norm
from fuseport.ops.rms_norm_gated import rms_norm_gated

__all__ = ["layernorm_fn", "rmsnorm_fn"]


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
    weight = beside(weight, x)
    if is_rms_norm and bias is None and z is not None:
        return rms_norm_gated(x, z, weight, eps, group_size, norm_before_gate)
    real = wide(x)
    value = x.to(real)
    if z is not None and not norm_before_gate:
        value = value * F.silu(z.to(real))
    if is_rms_norm:
        value = rms_norm(value, weight.to(real), eps, group_size)
    else:
        groups = value.unflatten(-1, (-1, group_size or value.shape[-1]))
        normal = F.layer_norm(groups, groups.shape[-1:], eps=eps).flatten(-2)
        value = normal * weight.to(real)
    if bias is not None:
        value = value + bias.to(real)
    if z is not None and norm_before_gate:
        value = value * F.silu(z.to(real))
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
