"""Cross-entropy of logits with classes: the softmax, its logarithm and the choice in one operator.

Values are those of `torch.nn.functional.cross_entropy`, with the label smoothing of Szegedy et al.,
"Rethinking the Inception architecture for computer vision", 2016, section 7. Of a forward pass only
each row's log-sum-exp is kept, in two numbers, not its softmax.
"""

from typing import Literal

import torch
from torch import Tensor

from fuseport.ops import registration
from fuseport.ops.checks import require
from fuseport.ops.softmax_cross_entropy import reference, shapes
from fuseport.ops.softmax_cross_entropy.cases import BUGS, CASES
from fuseport.ops.spec import Operator, OpSpec

__all__ = ["SPEC", "softmax_cross_entropy"]


def softmax_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> Tensor:
    """-Σ_j q_j·log softmax(logits)_j of each row; q = (1 - ε)·[j is the target] + ε/V.

    It is computed in float32, or float64 for float64 logits, and rounded once.

    Args:
        logits: (n, V), V ≥ 1: float16, bfloat16, float32 or float64, in any memory layout.
        targets: (n,), int64: in 0 to V-1, or `ignore_index`; on a GPU any other makes NaN.
        ignore_index: the target of rows whose loss is 0, and that a mean does not count.
        label_smoothing: ε, in 0 to 1.
        reduction: "mean" over rows that are not ignored, NaN if there are none; "sum", or "none".

    Returns:
        (n,) for "none", else a number, in the dtype of the logits; differentiable, once, in them.

    Raises:
        ValueError: a shape, dtype, device, target or option does not fit; the message names it.
    """
    registration.ensure(SPEC)
    known = reduction in ("mean", "sum", "none")
    require(known, SPEC.name, "reduction", "'mean', 'sum' or 'none'", repr(reduction))
    losses: Tensor = torch.ops.fuseport.softmax_cross_entropy(
        logits, targets, ignore_index, label_smoothing
    )[0]
    if reduction == "none":
        return losses.to(logits.dtype)
    total = losses.sum()
    if reduction == "mean":
        total = total / (targets != ignore_index).sum()
    return total.to(logits.dtype)


SPEC = OpSpec(
    name="softmax_cross_entropy",
    package=__name__,
    function=softmax_cross_entropy,
    operators=(
        Operator(
            name="softmax_cross_entropy",
            schema="(Tensor logits, Tensor targets, int ignore_index, float label_smoothing) "
            "-> (Tensor losses, Tensor largest, Tensor total)",
            reference=reference.softmax_cross_entropy,
            fake=shapes.fake_loss,
            backward="softmax_cross_entropy_backward",
        ),
        Operator(
            name="softmax_cross_entropy_backward",
            schema="(Tensor dlosses, Tensor logits, Tensor targets, Tensor largest, Tensor total, "
            "int ignore_index, float label_smoothing) -> Tensor dlogits",
            reference=reference.softmax_cross_entropy_backward,
            fake=shapes.fake_loss_backward,
        ),
    ),
    cases=CASES,
    bugs=BUGS,
    stands_for=(
        "xentropy",
        "cross_entropy_loss",
        "CrossEntropyLossFunction",
        "cross_entropy_fwd",
    ),
)
