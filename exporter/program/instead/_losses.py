"""Losses over as many values as a mask selects, or as a packed sequence has, in a capture.

Torch's own ask whether there are any. Formulas: torch.nn.CrossEntropyLoss and NLLLoss.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["LOSSES"]


def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """(n, classes, …), and (n, …) classes or (n, classes, …) probabilities."""
    reduction = _reduction(reduction, size_average, reduce)
    of_classes = 1 if input.dim() > 1 else 0
    logs, count = input.log_softmax(of_classes), input.shape[of_classes]
    if not target.is_floating_point():
        plain = _nll(logs, target, weight, ignore_index, reduction)
        if not label_smoothing:
            return plain
        each = -(logs if weight is None else logs * _along(weight, logs)).sum(of_classes)
        kept = target != ignore_index
        weights = _weights(target, kept, weight, input)
        smooth = _reduced(torch.where(kept, each, 0), weights, reduction)
        return (1 - label_smoothing) * plain + label_smoothing / count * smooth
    if label_smoothing:
        target = target * (1 - label_smoothing) + label_smoothing / count
    each = -(logs * target if weight is None else logs * target * _along(weight, logs))
    each = each.sum(of_classes)
    return _reduced(each, torch.ones_like(each), reduction)


def _nll_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """(n, classes, …) logarithms of probabilities, and (n, …) classes."""
    reduction = _reduction(reduction, size_average, reduce)
    return _nll(input, target, weight, ignore_index, reduction)


def _nll(
    logs: Tensor, target: Tensor, weight: Tensor | None, ignored: int, reduction: str
) -> Tensor:
    of_classes = 1 if logs.dim() > 1 else 0
    kept = target != ignored
    there = torch.where(kept, target, 0).unsqueeze(of_classes)
    weights = _weights(target, kept, weight, logs)
    each = -logs.gather(of_classes, there).squeeze(of_classes) * weights
    return _reduced(torch.where(kept, each, 0), weights, reduction)


def _weights(target: Tensor, kept: Tensor, weight: Tensor | None, like: Tensor) -> Tensor:
    """Of each target; 0 of those that are ignored."""
    if weight is None:
        return kept.to(like.dtype)
    found = weight.index_select(0, torch.where(kept, target, 0).flatten())
    return found.reshape(target.shape) * kept


def _along(weight: Tensor, x: Tensor) -> Tensor:
    return weight.reshape(-1, *[1] * max(x.dim() - 2, 0))


def _reduced(each: Tensor, weights: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return each
    return each.sum() if reduction == "sum" else each.sum() / weights.sum()


def _reduction(reduction: str, size_average: bool | None, reduce: bool | None) -> str:
    if size_average is None and reduce is None:
        return reduction
    if reduce is False:
        return "none"
    return "sum" if size_average is False else "mean"


LOSSES: dict[Any, Any] = {F.cross_entropy: _cross_entropy, F.nll_loss: _nll_loss}
"""What to compute for a loss whose sizes hang on values."""
