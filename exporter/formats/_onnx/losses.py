"""Losses that torch.onnx translates to something else."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._decomp import decomposition_table

from fuseport.exporter.formats._onnx.none import is_none_ever
from fuseport.exporter.program.instead._losses import LOSSES

__all__ = ["of_loss"]

aten = torch.ops.aten


def of_loss(node: torch.fx.Node) -> Callable[..., Any] | None:
    """What to take instead of a loss's operator; None where it is right, or is no loss."""
    if node.target is aten.nll_loss_forward.default:
        # Of a mean it has 1 for the sum of the weights, which the gradient divides by.
        return decomposition_table[node.target]
    if node.target in _OURS:
        x: Any = node.args[0]
        # The class that is left out is an attribute of ONNX's own, and may be a size here.
        if is_none_ever(x) or any(isinstance(given, torch.fx.Node) for given in node.args[4:5]):
            return _OURS[node.target]
    if node.target is aten.cross_entropy_loss.default and _more_than_classes(node):
        return aten.cross_entropy_loss.default.decompose
    return None


def _more_than_classes(loss: torch.fx.Node) -> bool:
    """Whether targets are smoothed, which it leaves out, or are probabilities."""
    smoothing = (*loss.args[5:6], loss.kwargs.get("label_smoothing", 0.0))[0]
    target = loss.args[1]
    assert isinstance(target, torch.fx.Node)
    return bool(smoothing != 0.0 or target.meta["val"].is_floating_point())


def _ours(loss: Callable[..., Any]) -> Callable[..., Tensor]:
    # ONNX's own make a volume of each example, of none of which sizes do not say how large.
    def form(
        x: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        reduction: int = 1,
        ignored: Any = -100,
        *smoothing: float,
    ) -> Tensor:
        by = ("none", "mean", "sum")[reduction]
        found: Tensor = loss(x, target, weight, None, ignored, None, by, *smoothing)
        return found

    return form


_OURS: dict[Any, Callable[..., Tensor]] = {
    aten.cross_entropy_loss.default: _ours(LOSSES[F.cross_entropy]),
    **{
        op.default: _ours(LOSSES[F.nll_loss])
        for op in (aten.nll_loss, aten.nll_loss2d, aten.nll_loss_nd)
    },
}
