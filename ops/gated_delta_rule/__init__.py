"""The gated delta rule: linear attention whose state forgets, and corrects what a key stands for.

Signature and semantics follow `chunk_gated_delta_rule` of flash-linear-attention (Yang, Kautz &
Hatamizadeh, "Gated Delta Networks: improving Mamba2 with delta rule", arXiv 2412.06464, equation
10), and with a decay for each key channel `chunk_kda` (Kimi Team, "Kimi Linear: an expressive,
efficient attention architecture", arXiv 2510.26692, equation 1), so that models that call them
work unchanged: they return a pair always.
"""

from typing import Literal, overload

import torch
from torch import Tensor

from fuseport.ops import registration
from fuseport.ops.delta_rules import wide_of
from fuseport.ops.evidence import Evidence
from fuseport.ops.gated_delta_rule import reference, shapes
from fuseport.ops.gated_delta_rule.cases import BENCH, BUGS, CASES
from fuseport.ops.spec import Operator, OpSpec

__all__ = ["SPEC", "gated_delta_rule"]

_EPS = 1e-6
"""Of the norm of queries and keys, as flash-linear-attention has it."""


@overload
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = ...,
    initial_state: Tensor | None = ...,
    output_final_state: Literal[False] = ...,
    use_qk_l2norm_in_kernel: bool = ...,
) -> tuple[Tensor, None]: ...
@overload
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = ...,
    initial_state: Tensor | None = ...,
    output_final_state: bool = ...,
    use_qk_l2norm_in_kernel: bool = ...,
) -> tuple[Tensor, Tensor | None]: ...
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attends over time; b batch, l length, G heads of q and k, H heads of v, K and V their widths.

    For each head of v, from S_0 = `initial_state`, (K, V):
    S'_t = exp(g_t)·S_{t-1}, in row i by g_{t,i} where g is of key channels;
    S_t = S'_t + k_t β_t (v_t - S'_tᵀ k_t)ᵀ; out_t = scale·S_tᵀ q_t.

    It is computed in float32, or in float64 where q is float64.

    Args:
        q: (b, l, G, K), float16, bfloat16, float32 or float64, in any memory layout.
        k: q's shape and dtype. Where its vectors are longer than 1, or beta is beyond 2, states
            may grow without bound.
        v: (b, l, H, V), q's dtype; head i takes head i // (H/G) of q and k.
        g: (b, l, H), or (b, l, H, K) for a decay of each key channel: the decay's logarithm; g,
            beta and initial_state are floating and are used in float32, or in float64 where q is.
        beta: (b, l, H).
        scale: what outputs are multiplied by; K**-0.5 for None.
        initial_state: (b, H, K, V), or None for zeros.
        output_final_state: whether the state after the last step is returned.
        use_qk_l2norm_in_kernel: whether q and k are divided by √(Σ x² + 1e-6) first: computed in
            float32 at least, and rounded to q's dtype.

    Returns:
        out, (b, l, H, V), q's dtype, contiguous; and with `output_final_state` the final state, (b,
        H, K, V), float32, or float64 where q is, else None. Both are differentiable, once, in all
        tensors that are given.

    Raises:
        ValueError: a shape, dtype or device does not fit; the message names the argument.
    """
    registration.ensure(SPEC)
    shapes.check_ranks("gated_delta_rule", q, v)
    shapes.check_decay("gated_delta_rule", g, v)
    keys, values = q.shape[3], v.shape[3]
    wide = wide_of(q)

    def widened(t: Tensor) -> Tensor:
        return t.to(wide) if t.is_floating_point() else t

    if use_qk_l2norm_in_kernel:
        q, k = _normed(q, wide), _normed(k, wide)
    if initial_state is None:
        shape = (q.shape[0], v.shape[2], keys, values)
        initial_state = torch.zeros(shape, dtype=wide, device=q.device)
    # A kernel takes a number: what a size that is not known yet would be, is multiplied by later.
    later = scale is None and isinstance(keys, torch.SymInt)
    factor = max(keys, 1) ** -0.5 if scale is None else scale
    out, final_state = torch.ops.fuseport.gated_delta_rule(
        q,
        k,
        v,
        widened(g.unsqueeze(3) if g.dim() == 3 else g),
        widened(beta),
        widened(initial_state),
        1.0 if later else factor,
    )
    if later:
        out = out * factor
    return out, final_state if output_final_state else None


def _normed(t: Tensor, wide: torch.dtype) -> Tensor:
    full = t.to(wide)
    return (full * torch.rsqrt((full * full).sum(-1, keepdim=True) + _EPS)).to(t.dtype)


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor initial_state, float scale"
_HEADS: dict[str, tuple[None, ...]] = {"A_log": (None,), "dt_bias": (None,)}
_MATRIX = (None, None)

SPEC = OpSpec(
    name="gated_delta_rule",
    package=__name__,
    function=gated_delta_rule,
    operators=(
        Operator(
            name="gated_delta_rule",
            schema=f"({_INPUTS}) -> (Tensor out, Tensor final_state)",
            reference=reference.gated_delta_rule,
            fake=shapes.fake_rule,
            backward="gated_delta_rule_backward",
        ),
        Operator(
            name="gated_delta_rule_backward",
            schema=f"(Tensor dout, Tensor dfinal_state, {_INPUTS}) -> (Tensor dq, Tensor dk, "
            "Tensor dv, Tensor dg, Tensor dbeta, Tensor dinitial_state)",
            reference=reference.gated_delta_rule_backward,
            fake=shapes.fake_rule_backward,
        ),
    ),
    cases=CASES,
    bugs=BUGS,
    stands_for=("gated_delta_rule", "chunk_kda", "kda_fwd", "fused_recurrent_kda"),
    keeps_float32=("A_log", "dt_bias"),
    bench=BENCH,
    evidence=(
        Evidence("a Gated DeltaNet mixer of Qwen3-Next", {**_HEADS, "in_proj_ba.weight": _MATRIX}),
        Evidence(
            "a Gated DeltaNet mixer of Qwen3.5",
            {**_HEADS, "in_proj_b.weight": _MATRIX, "in_proj_a.weight": _MATRIX},
        ),
        Evidence(
            "a Gated DeltaNet mixer of flash-linear-attention or OLMo",
            {**_HEADS, "b_proj.weight": _MATRIX, "a_proj.weight": _MATRIX},
        ),
        Evidence(
            "a Kimi Delta Attention mixer of Kimi Linear",
            {"A_log": (1, 1, None, 1), "f_a_proj.weight": _MATRIX, "b_proj.weight": _MATRIX},
        ),
        Evidence(
            "a KDA mixer of flash-linear-attention",
            {"A_log": (None,), "f_proj.0.weight": _MATRIX, "b_proj.weight": _MATRIX},
        ),
        Evidence(
            "a DeltaNet mixer of flash-linear-attention",
            {"k_proj.weight": _MATRIX, "b_proj.weight": _MATRIX, "o_norm.weight": (None,)},
            absent=("A_log",),
        ),
    ),
)
