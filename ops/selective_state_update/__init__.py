"""One decoding step of the selective scan: a state, advanced by one token.

Signature and semantics follow `selective_state_update` of state-spaces/mamba, which the decoding
loops of Mamba-1 and of Mamba-2 call; the formula is that of `fuseport.ops.selective_scan`, at one
step.
"""

import torch
from torch import Tensor

from fuseport.ops import registration
from fuseport.ops.bugs import SOFTPLUS_THRESHOLD
from fuseport.ops.selective_state_update import reference, shapes
from fuseport.ops.selective_state_update.cases import BENCH, BUGS, CASES
from fuseport.ops.spec import Operator, OpSpec

__all__ = ["SPEC", "selective_state_update"]


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
) -> Tensor:
    """Advances `state` by one token; b batch, h heads, d channels, N states, g groups.

    δ = dt + dt_bias, then softplus if `dt_softplus` (the identity above 20);
    state ← exp(δ A)·state + δ x B, in place; out = (Σ_N C·state + D·x)·SiLU(z), without what is not
    given. It is computed in float32, or in float64 where x is float64; C meets the state before it
    is rounded to its own dtype.

    Args:
        state: (b, h, d, N) or (b, d, N), x's dtype or float32; it is changed.
        x: (b, h, d) or (b, d), like state; float16, bfloat16, float32 or float64, any layout.
        dt: x's shape and dtype; it may be expanded over channels.
        A: (h, d, N) or (d, N); A, D and dt_bias are floating and are used in float32, or in float64
            where x is. Where A is expanded over states (stride 0), as Mamba-2 has it, there is one
            exponential for each channel.
        B: (b, g, N) or (b, N), x's dtype; head i takes group i // (h/g).
        C: like B.
        D: (h, d) or (d,), or None.
        z: x's shape and dtype, or None.
        dt_bias: D's shape, or None.
        dt_softplus: whether dt passes through softplus.

    Returns:
        out, x's shape and dtype, contiguous. It has no gradients: differentiating it raises
        RuntimeError. For training there is `fuseport.ops.selective_scan`.

    Raises:
        ValueError: a shape, dtype or device does not fit; the message names the argument.
    """
    registration.ensure(SPEC)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    headed = state.dim() != 3

    def heads(t: Tensor) -> Tensor:
        return t if headed else t.unsqueeze(1)

    def parameter(t: Tensor | None) -> Tensor:
        if t is None:
            return torch.zeros(A.shape[:-1], dtype=wide, device=A.device)
        return t.to(wide) if t.is_floating_point() else t

    rates, skip, bias = (parameter(t) for t in (A, D, dt_bias))
    if not headed:
        rates, skip, bias = rates.unsqueeze(0), skip.unsqueeze(0), bias.unsqueeze(0)
    coefficients = [t.unsqueeze(1) if t.dim() == 2 else t for t in (B, C)]
    inputs = (heads(state), heads(x), heads(dt), rates, *coefficients, skip)
    operators = torch.ops.fuseport
    if z is None:
        out, new_state = operators.selective_state_update(*inputs, bias, dt_softplus)
    else:
        out, new_state = operators.selective_state_update_gated(
            *inputs, heads(z), bias, dt_softplus
        )
    if not headed:
        out, new_state = out.squeeze(1), new_state.squeeze(1)
    state.copy_(new_state)
    result: Tensor = out
    return result


SPEC = OpSpec(
    name="selective_state_update",
    package=__name__,
    function=selective_state_update,
    operators=(
        Operator(
            name="selective_state_update",
            schema="(Tensor state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor D, "
            "Tensor dt_bias, bool dt_softplus) -> (Tensor out, Tensor new_state)",
            reference=reference.selective_state_update,
            fake=shapes.fake_update,
        ),
        Operator(
            name="selective_state_update_gated",
            schema="(Tensor state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor D, "
            "Tensor z, Tensor dt_bias, bool dt_softplus) -> (Tensor out, Tensor new_state)",
            reference=reference.selective_state_update_gated,
            fake=shapes.fake_update_gated,
        ),
    ),
    cases=CASES,
    bugs=BUGS,
    no_bugs=SOFTPLUS_THRESHOLD,
    keeps_float32=("A_log", ".D", "dt_proj.bias", "dt_bias"),
    float32_arguments=("D", "dt_bias"),
    stands_for=("selective_state_update",),
    lacks={"ONNX native": "no such operator"},
    bench=BENCH,
)
