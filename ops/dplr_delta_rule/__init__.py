"""The delta rule whose transition is diagonal plus low rank: linear attention as in RWKV-7.

Signature and semantics follow `chunk_dplr_delta_rule` of flash-linear-attention, which its RWKV-7
is made of, with keys that a state decays by and corrects each given by itself (B. Peng et al.,
"RWKV-7 'Goose' with Expressive Dynamic State Evolution", arXiv 2503.14456, equation 17, whose state
is the transpose of the one here). The kernel `wkv7` of RWKV-LM computes the same with a scale of 1,
from the logarithm of -log_decay.
"""

from typing import Literal, overload

import torch
from torch import Tensor

from fuseport.ops import registration
from fuseport.ops.delta_rules import wide_of
from fuseport.ops.dplr_delta_rule import reference, shapes
from fuseport.ops.dplr_delta_rule.cases import BENCH, BUGS, CASES
from fuseport.ops.evidence import Evidence
from fuseport.ops.spec import Operator, OpSpec

__all__ = ["SPEC", "dplr_delta_rule"]


@overload
def dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    log_decay: Tensor,
    scale: float | None = ...,
    initial_state: Tensor | None = ...,
    output_final_state: Literal[False] = ...,
) -> tuple[Tensor, None]: ...
@overload
def dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    log_decay: Tensor,
    scale: float | None = ...,
    initial_state: Tensor | None = ...,
    output_final_state: bool = ...,
) -> tuple[Tensor, Tensor | None]: ...
def dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    log_decay: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attends over time; n batch, l length, H heads, K and V the widths of keys and values.

    For each head, from S_0 = `initial_state`, (K, V):
    S_t = diag(exp(log_decay_t))·S_{t-1} + b_t (S_{t-1}ᵀ a_t)ᵀ + k_t v_tᵀ; out_t = scale·S_tᵀ q_t.
    `a` reads the state before it decays.

    It is computed in float32, or in float64 where q is float64.

    Args:
        q: (n, l, H, K), float16, bfloat16, float32 or float64, in any memory layout.
        k: q's shape and dtype.
        v: (n, l, H, V), q's dtype.
        a: q's shape and dtype; RWKV-7's is a key of length 1, negated.
        b: q's shape and dtype; RWKV-7's is that key times rates in 0 to 1. Where the lengths of a
            and b are more than 1 together, states may grow without bound.
        log_decay: q's shape, the logarithm of each key channel's decay; it and initial_state are
            floating and are used in float32, or in float64 where q is.
        scale: what outputs are multiplied by; K**-0.5 for None.
        initial_state: (n, H, K, V), or None for zeros.
        output_final_state: whether the state after the last step is returned.

    Returns:
        out, (n, l, H, V), q's dtype, contiguous; and with `output_final_state` the final state, (n,
        H, K, V), float32, or float64 where q is, else None. Both are differentiable, once, in all
        tensors that are given.

    Raises:
        ValueError: a shape, dtype or device does not fit; the message names the argument.
    """
    registration.ensure(SPEC)
    shapes.check_ranks("dplr_delta_rule", q, v)
    keys, values = q.shape[3], v.shape[3]
    wide = wide_of(q)

    def widened(t: Tensor) -> Tensor:
        return t.to(wide) if t.is_floating_point() else t

    if initial_state is None:
        shape = (q.shape[0], q.shape[2], keys, values)
        initial_state = torch.zeros(shape, dtype=wide, device=q.device)
    # A kernel takes a number: what a size that is not known yet would be, is multiplied by later.
    later = scale is None and isinstance(keys, torch.SymInt)
    factor = max(keys, 1) ** -0.5 if scale is None else scale
    out, final_state = torch.ops.fuseport.dplr_delta_rule(
        q, k, v, a, b, widened(log_decay), widened(initial_state), 1.0 if later else factor
    )
    if later:
        out = out * factor
    return out, final_state if output_final_state else None


_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor log_decay, Tensor initial_state, "
    "float scale"
)
_MATRIX = (None, None)

SPEC = OpSpec(
    name="dplr_delta_rule",
    package=__name__,
    function=dplr_delta_rule,
    operators=(
        Operator(
            name="dplr_delta_rule",
            schema=f"({_INPUTS}) -> (Tensor out, Tensor final_state)",
            reference=reference.dplr_delta_rule,
            fake=shapes.fake_rule,
            backward="dplr_delta_rule_backward",
        ),
        Operator(
            name="dplr_delta_rule_backward",
            schema=f"(Tensor dout, Tensor dfinal_state, {_INPUTS}) -> (Tensor dq, Tensor dk, "
            "Tensor dv, Tensor da, Tensor db, Tensor dlog_decay, Tensor dinitial_state)",
            reference=reference.dplr_delta_rule_backward,
            fake=shapes.fake_rule_backward,
        ),
    ),
    cases=CASES,
    bugs=BUGS,
    lacks={"ONNX native": "no such operator"},
    stands_for=("dplr_delta_rule", "rwkv7", "wkv7"),
    bench=BENCH,
    evidence=(
        Evidence(
            "an RWKV-7 mixer of flash-linear-attention",
            {"r_k": _MATRIX, "k_k": (None,), "k_a": (None,), "w_lora.lora.0.weight": _MATRIX},
        ),
        Evidence(
            "an RWKV-7 mixer of RWKV-LM",
            {"r_k": _MATRIX, "k_k": (1, 1, None), "w1": _MATRIX, "a1": _MATRIX},
        ),
        Evidence(
            "a GLA mixer of flash-linear-attention",
            {"k_proj.weight": _MATRIX, "gk_proj.0.weight": _MATRIX, "gk_proj.1.weight": _MATRIX},
        ),
        Evidence(
            "an HGRN2 mixer of flash-linear-attention",
            {"q_proj.weight": _MATRIX, "f_proj.weight": _MATRIX, "i_proj.weight": _MATRIX},
        ),
    ),
)
