"""Losses that torch.onnx translates to something else."""

from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import decomposition_table

__all__ = ["of_loss"]

aten = torch.ops.aten


def of_loss(node: torch.fx.Node) -> Callable[..., Any] | None:
    """What to take instead of a loss's operator; None where it is right, or is no loss."""
    if node.target is aten.nll_loss_forward.default:
        # Of a mean it has 1 for the sum of the weights, which the gradient divides by.
        return decomposition_table[node.target]
    if node.target is aten.cross_entropy_loss.default and _more_than_classes(node):
        return aten.cross_entropy_loss.default.decompose
    return None


def _more_than_classes(loss: torch.fx.Node) -> bool:
    """Whether targets are smoothed, which it leaves out, or are probabilities."""
    smoothing = (*loss.args[5:6], loss.kwargs.get("label_smoothing", 0.0))[0]
    target = loss.args[1]
    assert isinstance(target, torch.fx.Node)
    return bool(smoothing != 0.0 or target.meta["val"].is_floating_point())
