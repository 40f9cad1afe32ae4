"""The selective scan of Mamba-1: a gated, input-dependent linear recurrence over time.

Signature and semantics follow the extension that models in the wild call (Gu & Dao, "Mamba:
Linear-time sequence modeling with selective state spaces", 2023, algorithm 2 and equation 1b, with
the simplified discretisation of B), so that those models work unchanged.
"""

from typing import Literal, overload

import torch
from torch import Tensor

from fuseport.ops import registration
from fuseport.ops.bugs import SOFTPLUS_THRESHOLD
from fuseport.ops.evidence import Evidence
from fuseport.ops.selective_scan import reference, shapes
from fuseport.ops.selective_scan.cases import BENCH, BUGS, CASES
from fuseport.ops.spec import Operator, OpSpec

__all__ = ["SPEC", "selective_scan"]


@overload
def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = ...,
    z: Tensor | None = ...,
    delta_bias: Tensor | None = ...,
    delta_softplus: bool = ...,
    return_last_state: Literal[False] = ...,
) -> Tensor: ...
@overload
def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = ...,
    z: Tensor | None = ...,
    delta_bias: Tensor | None = ...,
    delta_softplus: bool = ...,
    *,
    return_last_state: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = ...,
    z: Tensor | None = ...,
    delta_bias: Tensor | None = ...,
    delta_softplus: bool = ...,
    return_last_state: bool = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...
def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Scans `u` over time; b batch, d channels, l length, N states, G groups.

    δ̂ = δ + delta_bias, then softplus if `delta_softplus` (the identity above 20);
    h_t = exp(δ̂_t A)·h_{t-1} + δ̂_t u_t B_t, from h = 0; y_t = Σ_N C_t h_t;
    out = (y + D·u)·SiLU(z), without what is not given. For complex A, h is complex, and
    y_t = 2·Re(Σ_N C_t h_t), as if each state had its conjugate beside it.

    Args:
        u: (b, d, l), float16, bfloat16, float32 or float64, in any memory layout.
        delta: (b, d, l), u's dtype.
        A: (d, N): float32 or complex64, or float64 or complex128 when u is float64.
        B: (d, N), (b, N, l) or (b, G, N, l), u's dtype; channel i takes group i // (d/G). For
            complex A: (d, N) of A's dtype, or (b, N, 2l) or (b, G, N, 2l) of u's dtype, with real
            and imaginary parts in turn.
        C: like B, independently of it.
        D: (d,), float32, or float64 when u is float64, or None.
        z: (b, d, l), u's dtype, or None.
        delta_bias: (d,), D's dtype, or None.
        delta_softplus: whether delta passes through softplus.
        return_last_state: whether the state after the last step is returned too.

    Returns:
        out, (b, d, l), in u's dtype, and in the layout like u's that `fuseport.ops.layout` states;
        with `return_last_state` the pair of out and the last state, (b, d, N), in A's dtype. Both
        are differentiable, once, in all tensors that are given; gradients of complex tensors are
        torch's, ∂L/∂Re + i·∂L/∂Im.

    Raises:
        ValueError: a shape, dtype or device does not fit; the message names the argument.
    """
    registration.ensure(SPEC)
    if D is None or delta_bias is None:
        real = A.dtype.to_real() if A.is_complex() else A.dtype
        zeros = torch.zeros(u.shape[1:2], dtype=real, device=A.device)
        D = zeros if D is None else D
        delta_bias = zeros if delta_bias is None else delta_bias
    operators = torch.ops.fuseport
    if z is None:
        out, last_state, _ = operators.selective_scan(
            u, delta, A, B, C, D, delta_bias, delta_softplus
        )
    else:
        out, last_state, _ = operators.selective_scan_gated(
            u, delta, A, B, C, D, z, delta_bias, delta_softplus
        )
    return (out, last_state) if return_last_state else out


SPEC = OpSpec(
    name="selective_scan",
    package=__name__,
    function=selective_scan,
    operators=(
        Operator(
            name="selective_scan",
            schema="(Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor D, "
            "Tensor delta_bias, bool delta_softplus) "
            "-> (Tensor out, Tensor last_state, Tensor chunk_states)",
            reference=reference.selective_scan,
            fake=shapes.fake_scan,
            backward="selective_scan_backward",
        ),
        Operator(
            name="selective_scan_gated",
            schema="(Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor D, Tensor z, "
            "Tensor delta_bias, bool delta_softplus) "
            "-> (Tensor out, Tensor last_state, Tensor chunk_states)",
            reference=reference.selective_scan_gated,
            fake=shapes.fake_scan_gated,
            backward="selective_scan_gated_backward",
        ),
        Operator(
            name="selective_scan_backward",
            schema="(Tensor dout, Tensor dlast_state, Tensor u, Tensor delta, Tensor A, Tensor B, "
            "Tensor C, Tensor D, Tensor delta_bias, Tensor chunk_states, bool delta_softplus) "
            "-> (Tensor du, Tensor ddelta, Tensor dA, Tensor dB, Tensor dC, Tensor dD, "
            "Tensor ddelta_bias)",
            reference=reference.selective_scan_backward,
            fake=shapes.fake_scan_backward,
        ),
        Operator(
            name="selective_scan_gated_backward",
            schema="(Tensor dout, Tensor dlast_state, Tensor u, Tensor delta, Tensor A, Tensor B, "
            "Tensor C, Tensor D, Tensor z, Tensor delta_bias, Tensor chunk_states, "
            "bool delta_softplus) "
            "-> (Tensor du, Tensor ddelta, Tensor dA, Tensor dB, Tensor dC, Tensor dD, Tensor dz, "
            "Tensor ddelta_bias)",
            reference=reference.selective_scan_gated_backward,
            fake=shapes.fake_scan_gated_backward,
        ),
    ),
    cases=CASES,
    bugs=BUGS,
    no_bugs=SOFTPLUS_THRESHOLD,
    keeps_float32=(
        "A_log",
        ".D",
        "dt_proj.bias",
        "A_b_log",
        ".D_b",
        "dt_proj_b.bias",
        "A_logs",
        "Ds",
        "dt_projs_bias",
    ),
    float32_arguments=("D", "delta_bias"),
    stands_for=(
        "selective_scan",
        "mamba_inner",
        "SelectiveScan",
    ),
    lacks={"ONNX native": "LinearAttention is slower"},
    bench=BENCH,
    evidence=(
        Evidence(
            "a Mamba-1 mixer",
            {"A_log": (None, None), "x_proj.weight": (None, None)},
        ),
        Evidence(
            "a scan backwards in time, of Vim or VideoMamba",
            {"A_b_log": (None, None), "x_proj_b.weight": (None, None)},
        ),
        Evidence(
            "a scan in several directions, of VMamba",
            {"A_logs": (None, None), "x_proj_weight": (None, None, None)},
        ),
    ),
)
