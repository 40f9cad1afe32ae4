"""The inner block of Mamba-1 between its two projections of the width: convolution, scan, gate.

Signature and semantics follow `mamba_inner_fn` of state-spaces/mamba, which models call as one
fused function. Here it is three ops and matrix products, and its gradients are those of its parts.
(The backward that was written for it there has been wrong: out_proj's bias got a scalar, and B and
C were normalised twice.)
"""

import torch.nn.functional as F
from torch import Tensor

from fuseport.ops.causal_conv1d import causal_conv1d
from fuseport.ops.rms_norm import rms_norm
from fuseport.ops.selective_scan import selective_scan

__all__ = ["mamba_inner_fn", "mamba_inner_fn_no_out_proj", "scan_inputs"]


def mamba_inner_fn(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
    checkpoint_lvl: int = 1,
    b_rms_weight: Tensor | None = None,
    c_rms_weight: Tensor | None = None,
    dt_rms_weight: Tensor | None = None,
    b_c_dt_rms_eps: float = 1e-6,
) -> Tensor:
    """The block with its output projection; b batch, d channels, l length, N states, r rank.

    x and z are the halves of xz. x = SiLU(conv1d(x)); (δ', B, C) = x_proj(x) for each step, where B
    and C are not given; then the scan with δ = delta_proj(δ') and gate z; then out_proj.

    Args:
        xz: (b, 2d, l), floating.
        conv1d_weight: (d, 1, W).
        conv1d_bias: (d,), or None.
        x_proj_weight: (r + 2N, d), or less N for each of B and C that is given; twice the N for
            complex A, real and imaginary parts interleaved.
        delta_proj_weight: (d, r).
        out_proj_weight: (o, d).
        out_proj_bias: (o,), or None.
        A: (d, N), float32 or complex64.
        B: (d, N) for the same at all steps, or None.
        C: like B.
        D: (d,), or None.
        delta_bias: (d,), or None.
        B_proj_bias: (N,), added to the B of each step, or None; twice the N for complex A.
        C_proj_bias: like B_proj_bias.
        delta_softplus: whether δ + delta_bias passes through softplus.
        checkpoint_lvl: has no effect: the ops save no more than states at chunk ends.
        b_rms_weight: (N,), with which the B of each step is normalised by its RMS, or None.
        c_rms_weight: (N,), the same for C.
        dt_rms_weight: (r,), the same for δ'.
        b_c_dt_rms_eps: of these norms.

    Returns:
        (b, l, o), in out_proj_weight's dtype.

    Raises:
        ValueError: a shape, dtype or device does not fit; the message names the op and argument.
    """
    out = mamba_inner_fn_no_out_proj(
        xz,
        conv1d_weight,
        conv1d_bias,
        x_proj_weight,
        delta_proj_weight,
        A,
        B,
        C,
        D,
        delta_bias,
        B_proj_bias,
        C_proj_bias,
        delta_softplus,
        checkpoint_lvl,
        b_rms_weight,
        c_rms_weight,
        dt_rms_weight,
        b_c_dt_rms_eps,
    )
    return F.linear(out.mT.to(out_proj_weight.dtype), out_proj_weight, out_proj_bias)


def mamba_inner_fn_no_out_proj(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
    checkpoint_lvl: int = 1,
    b_rms_weight: Tensor | None = None,
    c_rms_weight: Tensor | None = None,
    dt_rms_weight: Tensor | None = None,
    b_c_dt_rms_eps: float = 1e-6,
) -> Tensor:
    """The block without its output projection: (b, d, l), xz's dtype; else as `mamba_inner_fn`."""
    del checkpoint_lvl
    x, delta, B, C, z = scan_inputs(
        xz,
        conv1d_weight,
        conv1d_bias,
        x_proj_weight,
        delta_proj_weight,
        A,
        B,
        C,
        B_proj_bias,
        C_proj_bias,
        b_rms_weight,
        c_rms_weight,
        dt_rms_weight,
        b_c_dt_rms_eps,
    )
    out = selective_scan(
        x, delta, A, B, C, D, z=z, delta_bias=delta_bias, delta_softplus=delta_softplus
    )
    return out


def scan_inputs(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    b_rms_weight: Tensor | None = None,
    c_rms_weight: Tensor | None = None,
    dt_rms_weight: Tensor | None = None,
    b_c_dt_rms_eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What the block gives to its scan: (u, delta, B, C, z); arguments as of `mamba_inner_fn`."""
    inner, z = xz.chunk(2, 1)
    x = causal_conv1d(inner, conv1d_weight.flatten(1), conv1d_bias, activation="silu")
    assert isinstance(x, Tensor)
    rank, states = delta_proj_weight.shape[1], A.shape[1] * (2 if A.is_complex() else 1)
    given = [B is None, C is None]
    parts = F.linear(x.mT, x_proj_weight).split([rank, *(states for g in given if g)], -1)

    def normalised(t: Tensor, weight: Tensor | None) -> Tensor:
        return t if weight is None else rms_norm(t, weight, b_c_dt_rms_eps)

    def of_steps(t: Tensor, bias: Tensor | None, weight: Tensor | None) -> Tensor:
        t = normalised(t if bias is None else t + bias.to(t.dtype), weight)
        # For complex A (b, l, 2N), parts interleaved, becomes (b, 1, N, 2l).
        by_state: Tensor = t.unflatten(-1, (A.shape[1], -1)).transpose(1, 2)
        return by_state.flatten(2).unsqueeze(1)

    steps, *rest = parts
    if B is None:
        B = of_steps(rest[0], B_proj_bias, b_rms_weight)
    if C is None:
        C = of_steps(rest[-1], C_proj_bias, c_rms_weight)
    delta = F.linear(normalised(steps, dt_rms_weight), delta_proj_weight).mT
    return x, delta, B, C, z
