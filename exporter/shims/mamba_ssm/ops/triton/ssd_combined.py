"""Mamba-2's scan, and the block around it, over the registered ops."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.ops.causal_conv1d import causal_conv1d
from fuseport.ops.ssd_chunk_scan import ssd_chunk_scan

from .layernorm_gated import rmsnorm_fn

__all__ = [
    "mamba_chunk_scan",
    "mamba_chunk_scan_combined",
    "mamba_split_conv1d_scan_combined",
    "mamba_split_conv1d_scan_ref",
]

_NO_LIMIT = (0.0, float("inf"))


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = _NO_LIMIT,
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    state_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The op, see `fuseport.ops.ssd_chunk_scan`.

    Args:
        cu_seqlens: of the states of packed sequences, and without effect.
        return_varlen_states: must be False.
        state_dtype: of states between chunks, which are float32 or float64 here.

    Raises:
        NotImplementedError: states at the ends of packed sequences are wanted.
    """
    if return_varlen_states:
        raise NotImplementedError(
            "fuseport's mamba_chunk_scan_combined returns no states of packed sequences "
            "(return_varlen_states)"
        )
    return ssd_chunk_scan(
        x,
        dt.to(x.dtype),
        A,
        B.to(x.dtype),
        C.to(x.dtype),
        chunk_size,
        D,
        None if z is None else z.to(x.dtype),
        dt_bias,
        initial_states,
        None if seq_idx is None else seq_idx.int(),
        dt_softplus,
        dt_limit,
        return_final_states,
    )


def mamba_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
) -> Tensor:
    """`mamba_chunk_scan_combined` with fewer arguments."""
    out = mamba_chunk_scan_combined(
        x, dt, A, B, C, chunk_size, D, z, dt_bias, dt_softplus=dt_softplus
    )
    assert isinstance(out, Tensor)
    return out


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = _NO_LIMIT,
    return_final_states: bool = False,
    activation: str | None = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    state_dtype: torch.dtype | None = None,
) -> Any:
    """Mamba-2's block from the result of its first projection on.

    Args:
        zxbcdt: (b, l, 2m + 2d + 2GN + H), in this order: two parts of a gated MLP of width m beside
            the scan (m may be 0), the gate z, then x, B and C, and dt; d = H·P.
        conv1d_weight: (d + 2GN, W).
        conv1d_bias: (d + 2GN,), or None.
        dt_bias: (H,).
        A: (H,).
        D: (H,), or (H, P).
        chunk_size: has no effect on results.
        initial_states: (b, H, P, N), or None.
        seq_idx: (b, l), int32, the number of each step's packed sequence; or None.
        dt_limit: what dt is clamped to.
        return_final_states: whether the last states are returned too.
        activation: of the convolution: silu, swish or None.
        rmsnorm_weight: (d,) of a gated RMS norm; without it the scan itself is gated.
        rmsnorm_eps: of it.
        outproj_weight: (o, m + d), or None for no projection.
        outproj_bias: (o,), or None.
        headdim: P, where D is (H,).
        ngroups: G.
        norm_before_gate: of the norm.
        state_dtype: has no effect; see `mamba_chunk_scan_combined`.

    Returns:
        (b, l, o) or (b, l, m + d), and the states, (b, H, P, N), if wanted.

    Raises:
        ValueError: D is (H,), and there is no headdim.
    """
    width = D.shape[1] if D.dim() == 2 else headdim
    if width is None:
        raise ValueError("mamba_split_conv1d_scan_combined: headdim must be given where D is (H,)")
    heads = D.shape[0]
    d = heads * width
    convolved = conv1d_weight.shape[0]
    beside = (zxbcdt.shape[-1] - d - convolved - heads) // 2
    z0, x0, z, xbc, dt = zxbcdt.split([beside, beside, d, convolved, heads], -1)
    xbc = causal_conv1d(xbc.mT, conv1d_weight, conv1d_bias, seq_idx, activation=activation).mT
    coefficients = (convolved - d) // 2
    x, B, C = xbc.split([d, coefficients, coefficients], -1)
    gate = z.unflatten(-1, (heads, width)) if rmsnorm_weight is None else None
    result = mamba_chunk_scan_combined(
        x.unflatten(-1, (heads, width)),
        dt,
        A,
        B.unflatten(-1, (ngroups, -1)),
        C.unflatten(-1, (ngroups, -1)),
        chunk_size,
        D,
        gate,
        dt_bias,
        initial_states,
        seq_idx,
        dt_softplus=True,
        dt_limit=dt_limit,
        return_final_states=True,
    )
    out, final_states = result[0].flatten(-2), result[1]
    if rmsnorm_weight is not None:
        group = d // ngroups
        out = rmsnorm_fn(out, rmsnorm_weight, None, z, rmsnorm_eps, group, norm_before_gate)
    if beside:
        out = torch.cat([F.silu(z0) * x0, out], -1)
    if outproj_weight is not None:
        out = F.linear(out.to(outproj_weight.dtype), outproj_weight, outproj_bias)
    return (out, final_states) if return_final_states else out


mamba_split_conv1d_scan_ref = mamba_split_conv1d_scan_combined
