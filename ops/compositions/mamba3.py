"""The scan of Mamba-3 with all that its layer does to its inputs, and one step of decoding by it.

Signatures and semantics follow `mamba3_siso_combined` and `mamba3_mimo` of state-spaces/mamba
(Lahoti et al., "Mamba-3: improved sequence modeling using state space principles", 2026). The
kernels there cast to bfloat16 inside, for tensor cores: that is their rounding, not the meaning.
Here all stays in the inputs' dtype, and decays, step sizes, biases and angles in float32 at least.

With queries and keys turned by angles that grow with time, q and k, step sizes Δ, λ =
sigmoid(Trap) and decays g = ADT, the state is discretised by the trapezoidal rule:

    h_t = e^{g_t} (h_{t-1} + β_t v_{t-1} k_{t-1}ᵀ) + c_t v_t k_tᵀ,  β = (1-λ)Δ, c = λΔ
    y_t = h_t q_t + D v_t

It is `ssd_discrete` of values (c_t + β_{t+1}) v_t, less what of step t comes too early, β_{t+1}
(q_t·k_t) v_t. A layer of rank R ("MIMO") has R values, keys and queries at each step: these are R
steps of the scan, the first with the decay, and what lacks or is too much within a step is made
good by an R×R matrix. Rotations keep q·k, so it is computed before them, by groups of heads.

b batch, l length from 1 up, H heads of width P, G groups of heads that share queries and keys, N
states, A angles, R ranks, S sequences: b, or those packed in one row.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.ops.checks import require
from fuseport.ops.compositions._mamba3_scan import Given, States
from fuseport.ops.rms_norm_gated import rms_norm_gated

__all__ = ["States", "mamba3_mimo", "mamba3_mimo_step", "mamba3_siso", "mamba3_siso_step"]


def mamba3_siso(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    ADT: Tensor,
    DT: Tensor,
    Trap: Tensor,
    Q_bias: Tensor,
    K_bias: Tensor,
    Angles: Tensor,
    D: Tensor | None = None,
    Z: Tensor | None = None,
    Input_States: States | None = None,
    chunk_size: int = 64,
    return_final_states: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Scans V with one query and key at each step; sizes as of the module.

    Angles add tanh(angle)·π·Δ at each step, modulo 2π, summed in float64; channels 2i and 2i + 1
    of Q + Q_bias and K + K_bias are turned by angle i, and those from 2A on stay.

    Args:
        Q: (b, l, G, N), V's dtype; head i takes group i // (H/G).
        K: like Q.
        V: (b, l, H, P), float16, bfloat16, float32 or float64.
        ADT: (b, H, l), the logarithm of the decay, at most 0; used in float32, or in float64 where
            V is, as DT, Trap, the biases, Angles and D.
        DT: (b, H, l), Δ.
        Trap: (b, H, l), whose sigmoid is λ.
        Q_bias: (H, N).
        K_bias: (H, N).
        Angles: (b, l, H, A), or (b, l, 1, A) for the same in all heads; A ≤ N/2.
        D: (H,), or None.
        Z: (b, l, H, P): the result is multiplied by its SiLU; or None.
        Input_States: before the first step: angles (S, H, A), h (S, H, P, N), k (S, H, N) and v
            (S, H, P); None for zeros.
        chunk_size: has no effect on results.
        return_final_states: whether the same is returned of the last step.
        cu_seqlens: (S + 1,), integers: where sequences that are packed in one row, b = 1, begin,
            and the last one ends. With states, each is computed as long as all of them together.

    Returns:
        (b, l, H, P), V's dtype; with the states: angles in [0, 2π) and h in float32, or float64
        where V is, k and v in V's dtype. All are differentiable.

    Raises:
        ValueError: a shape does not fit; the message names the argument.
    """
    del chunk_size
    require(Q.dim() == 4, "mamba3_siso", "Q", "of 4 dimensions", tuple(Q.shape))
    biases = (Q_bias.unsqueeze(1), K_bias.unsqueeze(1))
    inputs = (Q.unsqueeze(2), K.unsqueeze(2), V, ADT, DT, Trap, *biases, Angles, D)
    given = Given("mamba3_siso", *inputs, None, True)
    out, states = _gated(given, Z, Input_States, cu_seqlens, return_final_states)
    return (out, *states) if return_final_states else out


def mamba3_mimo(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    ADT: Tensor,
    DT: Tensor,
    Trap: Tensor,
    Q_bias: Tensor,
    K_bias: Tensor,
    MIMO_V: Tensor,
    MIMO_Z: Tensor | None,
    MIMO_Out: Tensor | None,
    Angles: Tensor,
    D: Tensor | None,
    Z: Tensor | None,
    chunk_size: int = 16,
    rotary_dim_divisor: int = 4,
    dtype: torch.dtype | None = None,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    fuse_pregate_headwise_rms_norm: bool = False,
    outproj_norm_weight: Tensor | None = None,
    outproj_norm_eps: float = 1e-5,
    *,
    Input_States: States | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Scans V with R queries and keys at each step; what is not said here is as of `mamba3_siso`.

    The values of a step are V·MIMO_V, one for each rank. Channels i and i + N/2 are turned by
    angle i, for i < A. The extension's final states have no gradients; these have.

    Args:
        Q: (b, l, R, G, N).
        K: like Q.
        V: (b, l, H, P).
        ADT: (b, H, l).
        DT: (b, H, l).
        Trap: (b, H, l).
        Q_bias: (H, R, N).
        K_bias: (H, R, N).
        MIMO_V: (H, R, P).
        MIMO_Z: (H, R, P): the gate of a rank is SiLU(Z·MIMO_Z); None where Z is.
        MIMO_Out: (H, R, P): the result is Σ_r MIMO_Out_r·y_r; None for all y_r.
        Angles: (b, l, H, A), or (b, l, 1, A), with A = N / rotary_dim_divisor.
        D: (H,), or None.
        Z: (b, l, H, P), or None.
        chunk_size: has no effect on results.
        rotary_dim_divisor: 2 or 4.
        dtype: has no effect: that of V is used.
        return_state: whether the states after the last step are returned.
        cu_seqlens: (S + 1,), or None.
        fuse_pregate_headwise_rms_norm: whether each y_r of a head is divided by its RMS, and
            multiplied by outproj_norm_weight, before the gate.
        outproj_norm_weight: (H, P) or (H·P,), or None for ones.
        outproj_norm_eps: under the root.
        Input_States: angles (S, H, A), h (S, H, P, N), k (S, R, H, N) and v (S, H, P), or None.

    Returns:
        (b, l, H, P), or (b, l, R, H, P) without MIMO_Out; with the states, as Input_States.

    Raises:
        ValueError: a shape does not fit, Z comes without MIMO_Z, or there is a norm without a gate
            and MIMO_Out; the message names the argument.
    """
    del chunk_size, dtype
    op = "mamba3_mimo"
    require(Q.dim() == 5, op, "Q", "of 5 dimensions", tuple(Q.shape))
    _check_angles(op, Angles, Q.shape[-1], rotary_dim_divisor)
    given = Given(op, Q, K, V, ADT, DT, Trap, Q_bias, K_bias, Angles, D, MIMO_V, False)
    y, states = given.scanned(Input_States, cu_seqlens, return_state)
    out = _ended(
        op,
        y,
        Z,
        MIMO_Z,
        MIMO_Out,
        fuse_pregate_headwise_rms_norm,
        outproj_norm_weight,
        outproj_norm_eps,
    )
    out = out.to(V.dtype)
    return (out, *states) if return_state else out


def mamba3_siso_step(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    ADT: Tensor,
    DT: Tensor,
    Trap: Tensor,
    Q_bias: Tensor,
    K_bias: Tensor,
    Angles: Tensor,
    D: Tensor | None,
    Z: Tensor | None,
    Input_States: States,
) -> tuple[Tensor, States]:
    """`mamba3_siso` at one step: arguments without l, and states with S = b.

    Returns:
        (b, H, P), and the states after the step, anew; angles in [-64π, 64π), so that those of
        states that differ by roundings are near each other, too.

    Raises:
        ValueError: a shape does not fit; the message names the argument.
    """
    biases = (Q_bias.unsqueeze(1), K_bias.unsqueeze(1))
    inputs = (Q[:, None, None], K[:, None, None], V[:, None], ADT[..., None], DT[..., None])
    rest = (Trap[..., None], *biases, Angles[:, None], D)
    given = Given("mamba3_siso", *inputs, *rest, None, True, is_step=True)
    out, states = _gated(given, None if Z is None else Z[:, None], Input_States, None, True)
    return out.squeeze(1), states


def mamba3_mimo_step(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    ADT: Tensor,
    DT: Tensor,
    Trap: Tensor,
    Q_bias: Tensor,
    K_bias: Tensor,
    MIMO_V: Tensor,
    MIMO_Z: Tensor | None,
    MIMO_Out: Tensor | None,
    Angles: Tensor,
    D: Tensor | None,
    Z: Tensor | None,
    Input_States: States,
    rotary_dim_divisor: int = 4,
    fuse_pregate_headwise_rms_norm: bool = False,
    outproj_norm_weight: Tensor | None = None,
    outproj_norm_eps: float = 1e-5,
) -> tuple[Tensor, States]:
    """`mamba3_mimo` at one step: arguments without l, and states with S = b.

    Returns:
        (b, H, P), or (b, R, H, P) without MIMO_Out, and the states after the step, as those of
        `mamba3_siso_step`.

    Raises:
        ValueError: as `mamba3_mimo`.
    """
    op = "mamba3_mimo"
    _check_angles(op, Angles, Q.shape[-1], rotary_dim_divisor)
    inputs = (Q[:, None], K[:, None], V[:, None], ADT[..., None], DT[..., None], Trap[..., None])
    rest = (Q_bias, K_bias, Angles[:, None], D, MIMO_V)
    y, states = Given(op, *inputs, *rest, False, is_step=True).scanned(Input_States, None, True)
    out = _ended(
        op,
        y,
        None if Z is None else Z[:, None],
        MIMO_Z,
        MIMO_Out,
        fuse_pregate_headwise_rms_norm,
        outproj_norm_weight,
        outproj_norm_eps,
    )
    return out.to(V.dtype).squeeze(1), states


def _check_angles(op: str, Angles: Tensor, width: int, divisor: int) -> None:
    """Raises ValueError unless MIMO has as many angles as it must have."""
    require(divisor in (2, 4), op, "rotary_dim_divisor", "2 or 4", divisor)
    found, angles = Angles.shape[-1], width // divisor
    require(found == angles, op, "Angles", f"of {angles} angles", found)


def _gated(
    given: Given,
    Z: Tensor | None,
    states: States | None,
    cu_seqlens: Tensor | None,
    with_states: bool,
) -> tuple[Tensor, States]:
    """A scan of rank 1 and its gate, in V's dtype; the k of states has no ranks."""
    if states is not None:
        angle, h, k, v = states
        states = (angle, h, k.unsqueeze(1), v)
    y, (angle, h, k, v) = given.scanned(states, cu_seqlens, with_states)
    out = y.squeeze(2)
    if Z is not None:
        out = out * F.silu(Z)
    return out.to(given.V.dtype), (angle, h, k.squeeze(1), v)


def _ended(
    op: str,
    y: Tensor,
    Z: Tensor | None,
    mix: Tensor | None,
    out: Tensor | None,
    norm: bool,
    weight: Tensor | None,
    eps: float,
) -> Tensor:
    """Gate, norm and contraction of y, (b, l, R, H, P)."""
    gate = None
    if Z is not None:
        if mix is None:
            raise ValueError(f"fuseport::{op}: MIMO_Z must be given where Z is; got None")
        gate = Z.unsqueeze(2) * mix.transpose(0, 1).to(y.dtype)
    if norm:
        if gate is None or out is None:
            raise ValueError(f"fuseport::{op}: a fused norm must have Z and MIMO_Out; got None")
        flat = y.flatten(-2)
        weight = flat.new_ones(flat.shape[-1]) if weight is None else weight.flatten()
        y = rms_norm_gated(
            flat, gate.flatten(-2).to(y.dtype), weight.to(y.dtype), eps, y.shape[-1], True
        ).unflatten(-1, y.shape[-2:])
    elif gate is not None:
        y = y * F.silu(gate)
    return y if out is None else torch.einsum("blrhp,hrp->blhp", y, out.to(y.dtype))
