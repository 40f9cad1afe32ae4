"""Losses of fla."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.exporter.shims._dtypes import wide
from fuseport.ops.softmax_cross_entropy import softmax_cross_entropy

__all__ = ["FUNCTIONS"]


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    logit_softcapping: float | None = None,
    ignore_index: int = -100,
    process_group: Any = None,
) -> tuple[Tensor, Tensor]:
    """The loss of each row, float32 at least, and what of it is the squared logsumexp's.

    Args:
        logits: (n, V); they are scaled, then capped: c·tanh(x/c).
        target: (n,), int64.
        label_smoothing: in 0 to 1.
        logit_scale: what logits are multiplied by.
        lse_square_scale: the weight of logsumexp(logits)².
        logit_softcapping: c, or None.
        ignore_index: the target of rows whose loss is 0.
        process_group: of a vocabulary that is split over processes: None.
    """
    if process_group is not None:
        raise NotImplementedError("with a vocabulary that is split over processes")
    values = _capped(logits, logit_scale, logit_softcapping)
    loss = softmax_cross_entropy(values, target, ignore_index, label_smoothing, "none")
    if not lse_square_scale:
        return loss, torch.zeros_like(loss)
    of_rows = lse_square_scale * values.logsumexp(1).square()
    of_rows = of_rows.masked_fill(target == ignore_index, 0.0)
    return loss + of_rows, of_rows.detach()


def _capped(logits: Tensor, scale: float, cap: float | None) -> Tensor:
    values = logits.to(wide(logits)) * scale
    return values if cap is None else cap * torch.tanh(values / cap)


def cross_entropy_loss_forward(self: Any, input: Tensor, target: Tensor) -> Any:
    """The module's, on any device."""
    loss, of_rows = cross_entropy(
        input,
        target,
        self.label_smoothing,
        self.logit_scale,
        self.lse_square_scale,
        getattr(self, "logit_softcapping", None),
        self.ignore_index,
        self.process_group,
    )
    if self.reduction == "none":
        return (loss, of_rows) if self.return_z_loss else loss
    count = (target != self.ignore_index).sum() if self.reduction == "mean" else 1
    if not self.return_z_loss:
        return loss.sum() / count
    return loss.sum() / count, of_rows.sum() / count


def linear_cross_entropy(
    x: Tensor,
    target: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    logit_softcapping: float | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    l2_penalty_factor: float = 1e-4,
) -> Tensor:
    """The loss of a linear layer's logits: their mean over rows that are not ignored, or sum."""
    values = _capped(F.linear(x, weight, bias), logit_scale, logit_softcapping)
    return softmax_cross_entropy(values, target, ignore_index, label_smoothing, reduction)


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "cross_entropy_loss": cross_entropy,
    "FusedCrossEntropyLoss.forward": cross_entropy_loss_forward,
    "fused_linear_cross_entropy_loss": linear_cross_entropy,
}
