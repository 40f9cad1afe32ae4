"""The losses as `SoftmaxCrossEntropyLoss`, which ONNX has, without label smoothing."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["TYPES", "decompositions"]

TYPES = {"SoftmaxCrossEntropyLoss"}


def decompositions() -> dict[str, Callable[..., Any]]:
    """Forms in that operator, by name of ours; one returns None for what it has not."""
    return {"softmax_cross_entropy": _losses}


def _losses(
    logits: Tensor, targets: Tensor, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, Tensor, Tensor] | None:
    if label_smoothing != 0:
        return None
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    losses = torch.onnx.ops.symbolic(
        "SoftmaxCrossEntropyLoss",
        (logits.to(wide), targets),
        {"ignore_index": ignore_index, "reduction": "none"},
        dtype=wide,
        shape=logits.shape[:1],
        version=13,
    )
    # Only the backward node of torch reads what is saved; the ONNX one has no use for it.
    saved = logits.new_zeros(logits.shape[:1], dtype=wide)
    return losses, saved, saved.clone()
