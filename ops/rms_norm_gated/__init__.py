"""RMS normalisation with a gate, as Mamba-2 ends a mixer: before the gate or after it.

Source: Dao & Gu, "Transformers are SSMs", 2024, section 7.1, and the `norm_before_gate` of the
code that came with it. The two orders are different functions, and checkpoints differ in them:
Hugging Face's Mamba-2 (`MambaRMSNormGated`) has `norm_before_gate=False`.
"""

import torch
from torch import Tensor

from fuseport.ops import registration
from fuseport.ops.evidence import Evidence
from fuseport.ops.rms_norm.shapes import group_size_of
from fuseport.ops.rms_norm_gated import reference, shapes
from fuseport.ops.rms_norm_gated.cases import BENCH, BUGS, CASES
from fuseport.ops.spec import Operator, OpSpec

__all__ = ["SPEC", "rms_norm_gated"]


def rms_norm_gated(
    x: Tensor,
    z: Tensor,
    weight: Tensor,
    eps: float = 1e-5,
    group_size: int | None = None,
    norm_before_gate: bool = True,
) -> Tensor:
    """norm(x)·weight·SiLU(z), or norm(x·SiLU(z))·weight where the norm is not before the gate.

    norm(v) = v / √(mean(v²) + eps), with one mean for each group of channels in a row. It is
    computed in float32, or float64 for a float64 `x`, and rounded once.

    Args:
        x: (…, d), float16, bfloat16, float32 or float64, in any memory layout.
        z: x's shape and dtype, in any memory layout.
        weight: (d,), x's dtype, or float32 beside a half type.
        eps: finite and not negative.
        group_size: how many channels in a row share a mean, a divisor of d; None means all d.
        norm_before_gate: which of the two it is.

    Returns:
        (…, d), contiguous, in x's dtype; differentiable, once, in `x`, `z` and `weight`.

    Raises:
        ValueError: a shape, dtype, device or number does not fit; the message names the argument.
    """
    registration.ensure(SPEC)
    size = group_size_of(weight, group_size)
    operator = torch.ops.fuseport.rms_norm_gated
    out: Tensor = operator(x, z, weight, eps, size, norm_before_gate)[0]
    return out


SPEC = OpSpec(
    name="rms_norm_gated",
    package=__name__,
    function=rms_norm_gated,
    operators=(
        Operator(
            name="rms_norm_gated",
            schema="(Tensor x, Tensor z, Tensor weight, float eps, int group_size, "
            "bool norm_before_gate) -> (Tensor out, Tensor rstd)",
            reference=reference.rms_norm_gated,
            fake=shapes.fake_norm_gated,
            backward="rms_norm_gated_backward",
        ),
        Operator(
            name="rms_norm_gated_backward",
            schema="(Tensor dout, Tensor x, Tensor z, Tensor weight, Tensor rstd, float eps, "
            "int group_size, bool norm_before_gate) "
            "-> (Tensor dx, Tensor dz, Tensor dweight)",
            reference=reference.rms_norm_gated_backward,
            fake=shapes.fake_norm_gated_backward,
        ),
    ),
    cases=CASES,
    bugs=BUGS,
    no_bugs={
        "another eps in backward: *: eps": "the backward reads rstd, which has eps in it already"
    },
    stands_for=(
        "rmsnorm_fn",
        "RMSNormGated",
        "rms_norm_gated",
        "layernorm_gated",
    ),
    bench=BENCH,
    evidence=(
        Evidence("a Mamba-2 mixer", {"A_log": (None,), "dt_bias": (None,), "norm.weight": (None,)}),
    ),
)
