"""The scan of Mamba-2, structured state space duality: one decay for each head and step.

Signature and semantics follow `mamba_chunk_scan_combined` of state-spaces/mamba (Dao & Gu,
"Transformers are SSMs: generalized models and efficient algorithms through structured state space
duality", 2024, section 6), so that models that call it work unchanged.
"""

from typing import Literal, overload

import torch
from torch import Tensor

from fuseport.ops import registration
from fuseport.ops.bugs import SOFTPLUS_THRESHOLD
from fuseport.ops.evidence import Evidence
from fuseport.ops.spec import Operator, OpSpec
from fuseport.ops.ssd_chunk_scan import reference, shapes
from fuseport.ops.ssd_chunk_scan.cases import BENCH, BUGS, CASES

__all__ = ["SPEC", "ssd_chunk_scan", "ssd_discrete"]

_INF = float("inf")


@overload
def ssd_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int = ...,
    D: Tensor | None = ...,
    z: Tensor | None = ...,
    dt_bias: Tensor | None = ...,
    initial_states: Tensor | None = ...,
    seq_idx: Tensor | None = ...,
    dt_softplus: bool = ...,
    dt_limit: tuple[float, float] = ...,
    return_final_states: Literal[False] = ...,
) -> Tensor: ...
@overload
def ssd_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int = ...,
    D: Tensor | None = ...,
    z: Tensor | None = ...,
    dt_bias: Tensor | None = ...,
    initial_states: Tensor | None = ...,
    seq_idx: Tensor | None = ...,
    dt_softplus: bool = ...,
    dt_limit: tuple[float, float] = ...,
    return_final_states: bool = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...
def ssd_chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int = shapes.CHUNK,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, _INF),
    return_final_states: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Scans `x` over time; b batch, l length, H heads, P head width, G groups, N states.

    δ = dt + dt_bias, then softplus if `dt_softplus` (the identity above 20), then clamped to
    `dt_limit`; h_t = exp(δ_t A)·h_{t-1} + δ_t x_t B_tᵀ, (P, N), for each head, from
    `initial_states`; out_t = (h_t C_t + D·x_t)·SiLU(z_t), without what is not given. Where
    `seq_idx` changes from step t-1 to t, h_t is δ_t x_t B_tᵀ alone.

    It is computed in float32, or in float64 where x is float64.

    Args:
        x: (b, l, H, P), float16, bfloat16, float32 or float64, in any memory layout.
        dt: (b, l, H), x's dtype.
        A: (H,), floating; A, D, dt_bias and initial_states are used in float32, or in float64
            where x is.
        B: (b, l, G, N), x's dtype; head i takes group i // (H/G).
        C: like B.
        chunk_size: positive; results do not depend on it, but for rounding in other
            implementations: here chunks are of 64 steps.
        D: (H,) or (H, P), or None.
        z: like x, or None.
        dt_bias: (H,), or None.
        initial_states: (b, H, P, N), or None for zeros.
        seq_idx: (b, l), int32, or None. Sequences are packed along time: a change of the number
            begins another, also where the number has been there before. `initial_states` are those
            before the first sequence, whatever its number (mamba_ssm takes them where it is 0).
        dt_softplus: whether dt passes through softplus.
        dt_limit: what dt is clamped to; with the default a negative dt becomes 0.
        return_final_states: whether the states after the last step are returned too.

    Returns:
        out, (b, l, H, P), x's dtype, contiguous; with `return_final_states` the pair of out and the
        final states, those of the last sequence, (b, H, P, N), float32, or float64 where x is. Both
        are differentiable, once, in all tensors that are given but seq_idx.

    Raises:
        ValueError: a shape, dtype or device does not fit; the message names the argument.
    """
    registration.ensure(SPEC)
    if chunk_size < 1:
        raise ValueError(f"fuseport::ssd_chunk_scan: chunk_size must be positive; got {chunk_size}")
    low, high = dt_limit
    if not low <= high:
        raise ValueError(f"fuseport::ssd_chunk_scan: dt_limit must be in order; got {dt_limit}")
    shapes.check_ranks("ssd_chunk_scan", x, B)
    given = _Given(x)
    b, _, heads, width = x.shape
    limits = [torch.full((1,), bound, dtype=given.wide, device=x.device) for bound in (low, high)]
    inputs = (x, dt, given.parameter(A), B, C, given.skip(D))
    rest = (
        given.parameter(dt_bias, heads),
        given.parameter(initial_states, b, heads, width, B.shape[3]),
        given.sequences(seq_idx),
        torch.cat(limits),
        dt_softplus,
    )
    operators = torch.ops.fuseport
    if z is None:
        out, final_states = operators.ssd_chunk_scan(*inputs, *rest)
    else:
        out, final_states = operators.ssd_chunk_scan_gated(*inputs, z, *rest)
    return (out, final_states) if return_final_states else out


def ssd_discrete(
    x: Tensor,
    log_decay: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Scans `x` over time with decays that are given; sizes as of `ssd_chunk_scan`.

    h_t = exp(log_decay_t)·h_{t-1} + x_t B_tᵀ, from `initial_states`, and out_t = h_t C_t + D·x_t;
    where `seq_idx` changes from step t-1 to t, h_t is x_t B_tᵀ alone. It is linear attention with
    queries C, keys B, values x and a decay for each head and step, which Mamba-3 and simple gated
    linear attention are made of.

    Source: Dao & Gu, 2024 (above), section 3.2.1 and listing 1, whose X and A these are.

    Args:
        x: (b, l, H, P), float16, bfloat16, float32 or float64, in any memory layout.
        log_decay: (b, l, H), -∞ where all is forgotten; used in float32, or in float64 where x is,
            as D and initial_states.
        B: (b, l, G, N), x's dtype; head i takes group i // (H/G).
        C: like B.
        D: (H,) or (H, P), or None.
        initial_states: (b, H, P, N), or None for zeros.
        seq_idx: (b, l), int32, or None for one sequence; as of `ssd_chunk_scan`.

    Returns:
        out, (b, l, H, P), x's dtype, and the states after the last step, (b, H, P, N), float32, or
        float64 where x is; both contiguous, and differentiable, once, in all tensors but seq_idx.

    Raises:
        ValueError: a shape, dtype or device does not fit; the message names the argument.
    """
    registration.ensure(SPEC)
    shapes.check_ranks("ssd_chunk_scan_discrete", x, B)
    given = _Given(x)
    out: tuple[Tensor, Tensor] = torch.ops.fuseport.ssd_chunk_scan_discrete(
        x,
        log_decay.to(given.wide) if log_decay.is_floating_point() else log_decay,
        B,
        C,
        given.skip(D),
        given.parameter(initial_states, x.shape[0], *x.shape[2:], B.shape[3]),
        given.sequences(seq_idx),
    )
    return out


class _Given:
    """What is beside x, as operators take it: real, and zeros where it is not given."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.wide = torch.float64 if x.dtype == torch.float64 else torch.float32

    def parameter(self, t: Tensor | None, *shape: int) -> Tensor:
        if t is None:
            return torch.zeros(shape, dtype=self.wide, device=self.x.device)
        return t.to(self.wide) if t.is_floating_point() else t

    def skip(self, D: Tensor | None) -> Tensor:
        heads, width = self.x.shape[2:]
        skip = self.parameter(D, heads, width)
        expands = skip.dim() == 1 and skip.shape[0] == heads
        return skip[:, None].expand(heads, width) if expands else skip

    def sequences(self, seq_idx: Tensor | None) -> Tensor:
        if seq_idx is not None:
            return seq_idx
        return torch.zeros(self.x.shape[:2], dtype=torch.int32, device=self.x.device)


_INPUTS = "Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor D, "
_REST = "Tensor dt_bias, Tensor initial_states, Tensor seq_idx, Tensor dt_limit, bool dt_softplus"
_DISCRETE = "Tensor x, Tensor log_decay, Tensor B, Tensor C, Tensor D, Tensor initial_states, "
_GRADIENTS = "Tensor dx, Tensor ddt, Tensor dA, Tensor dB, Tensor dC, Tensor dD, "

SPEC = OpSpec(
    name="ssd_chunk_scan",
    package=__name__,
    function=ssd_chunk_scan,
    operators=(
        Operator(
            name="ssd_chunk_scan",
            schema=f"({_INPUTS}{_REST}) -> (Tensor out, Tensor final_states)",
            reference=reference.ssd_chunk_scan,
            fake=shapes.fake_scan,
            backward="ssd_chunk_scan_backward",
        ),
        Operator(
            name="ssd_chunk_scan_gated",
            schema=f"({_INPUTS}Tensor z, {_REST}) -> (Tensor out, Tensor final_states)",
            reference=reference.ssd_chunk_scan_gated,
            fake=shapes.fake_scan_gated,
            backward="ssd_chunk_scan_gated_backward",
        ),
        Operator(
            name="ssd_chunk_scan_backward",
            schema=f"(Tensor dout, Tensor dfinal_states, {_INPUTS}{_REST}) "
            f"-> ({_GRADIENTS}Tensor ddt_bias, Tensor dinitial_states)",
            reference=reference.ssd_chunk_scan_backward,
            fake=shapes.fake_scan_backward,
        ),
        Operator(
            name="ssd_chunk_scan_gated_backward",
            schema=f"(Tensor dout, Tensor dfinal_states, {_INPUTS}Tensor z, {_REST}) "
            f"-> ({_GRADIENTS}Tensor dz, Tensor ddt_bias, Tensor dinitial_states)",
            reference=reference.ssd_chunk_scan_gated_backward,
            fake=shapes.fake_scan_gated_backward,
        ),
        Operator(
            name="ssd_chunk_scan_discrete",
            schema=f"({_DISCRETE}Tensor seq_idx) -> (Tensor out, Tensor final_states)",
            reference=reference.ssd_chunk_scan_discrete,
            fake=shapes.fake_scan_discrete,
            backward="ssd_chunk_scan_discrete_backward",
        ),
        Operator(
            name="ssd_chunk_scan_discrete_backward",
            schema=f"(Tensor dout, Tensor dfinal_states, {_DISCRETE}Tensor seq_idx) "
            "-> (Tensor dx, Tensor dlog_decay, Tensor dB, Tensor dC, Tensor dD, "
            "Tensor dinitial_states)",
            reference=reference.ssd_chunk_scan_discrete_backward,
            fake=shapes.fake_scan_discrete_backward,
        ),
    ),
    cases=CASES,
    bugs=BUGS,
    no_bugs=SOFTPLUS_THRESHOLD,
    keeps_float32=("A_log", ".D", "dt_bias", "B_bias", "C_bias", ".mimo_x", ".mimo_z", ".mimo_o"),
    float32_arguments=("D", "dt_bias"),
    stands_for=(
        "mamba_chunk_scan",
        "mamba_split_conv1d_scan",
        "ssd_chunk",
        "chunk_state",
        "chunk_scan_fwd",
    ),
    bench=BENCH,
    evidence=(
        Evidence(
            "a Mamba-2 mixer",
            {"A_log": (None,), "dt_bias": (None,), "in_proj.weight": (None, None)},
        ),
        Evidence(
            "a Mamba-3 mixer",
            {
                "B_bias": (None, None, None),
                "C_bias": (None, None, None),
                "dt_bias": (None,),
                "in_proj.weight": (None, None),
            },
        ),
    ),
)
