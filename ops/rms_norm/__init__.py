"""RMS normalisation: each row, or each group of its channels, divided by its root mean square.

Source: Zhang & Sennrich, "Root mean square layer normalization", 2019, equation 4, with the eps
that implementations put under the root. `rms_norm_gated` is the form with a gate.
"""

import torch
from torch import Tensor

from fuseport.ops import registration
from fuseport.ops.evidence import Evidence
from fuseport.ops.rms_norm import reference, shapes
from fuseport.ops.rms_norm.cases import BENCH, BUGS, CASES
from fuseport.ops.spec import Operator, OpSpec

__all__ = ["SPEC", "rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5, group_size: int | None = None) -> Tensor:
    """x · weight / √(mean(x²) + eps), with one mean for each group of channels in a row.

    It is computed in float32, or float64 for a float64 `x`, and rounded once.

    Args:
        x: (…, d), float16, bfloat16, float32 or float64, in any memory layout.
        weight: (d,), x's dtype, or float32 beside a half type.
        eps: finite and not negative.
        group_size: how many channels in a row share a mean, a divisor of d; None means all d.

    Returns:
        (…, d), contiguous, in x's dtype; differentiable, once, in `x` and `weight`.

    Raises:
        ValueError: a shape, dtype, device or number does not fit; the message names the argument.
    """
    registration.ensure(SPEC)
    size = shapes.group_size_of(weight, group_size)
    out: Tensor = torch.ops.fuseport.rms_norm(x, weight, eps, size)[0]
    return out


SPEC = OpSpec(
    name="rms_norm",
    package=__name__,
    function=rms_norm,
    operators=(
        Operator(
            name="rms_norm",
            schema="(Tensor x, Tensor weight, float eps, int group_size) "
            "-> (Tensor out, Tensor rstd)",
            reference=reference.rms_norm,
            fake=shapes.fake_norm,
            backward="rms_norm_backward",
        ),
        Operator(
            name="rms_norm_backward",
            schema="(Tensor dout, Tensor x, Tensor weight, Tensor rstd, float eps, "
            "int group_size) -> (Tensor dx, Tensor dweight)",
            reference=reference.rms_norm_backward,
            fake=shapes.fake_norm_backward,
        ),
    ),
    cases=CASES,
    bugs=BUGS,
    no_bugs={
        "another eps in backward: *: eps": "the backward reads rstd, which has eps in it already"
    },
    stands_for=(
        "rms_norm",
        "RMSNorm",
        "rmsnorm",
        "layer_norm_fn",
        "layer_norm_fwd",
    ),
    bench=BENCH,
    evidence=(
        Evidence(
            "a norm with a weight and no bias",
            {"*norm*.weight": (None,)},
            absent=("*norm*.bias", "*norm*.running_mean", "A_log"),
        ),
    ),
)
