"""The cross-entropy kernel's call, over the registered op."""

from typing import Any

import torch
from torch import Tensor

from fuseport.ops.softmax_cross_entropy import softmax_cross_entropy

__all__ = ["cross_entropy_loss"]


def cross_entropy_loss(
    logits: Tensor,
    labels: Tensor,
    precomputed_lse: Tensor | None = None,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    ignore_index: int = -100,
    inplace_backward: bool = False,
    process_group: Any = None,
) -> tuple[Tensor, Tensor]:
    """Each row's cross-entropy, float32, or float64 for float64 logits; see the op.

    Args:
        logits: (n, V), of a floating dtype.
        labels: (n,), integers: in 0 to V-1, or `ignore_index`.
        precomputed_lse: not needed here.
        label_smoothing: ε, in 0 to 1.
        logit_scale: of the logits.
        lse_square_scale: c of c·z², which is added, z being the row's log-sum-exp.
        ignore_index: the label of rows whose loss is 0.
        inplace_backward: has no effect.
        process_group: must be None.

    Returns:
        The losses, (n,); and what of each is c·z², through which no gradient goes.

    Raises:
        NotImplementedError: a process group is given.
        ValueError: as the op.
    """
    if process_group is not None:
        raise NotImplementedError("fuseport's cross_entropy_loss is not of several devices")
    wide = logits if logits.dtype == torch.float64 else logits.float()
    wide = wide if logit_scale == 1.0 else wide * logit_scale
    labels = labels.long()
    losses = softmax_cross_entropy(wide, labels, ignore_index, label_smoothing, "none")
    if lse_square_scale == 0.0:
        return losses, torch.zeros_like(losses)
    squares = lse_square_scale * wide.logsumexp(-1).square()
    squares = squares.masked_fill(labels == ignore_index, 0.0)
    return losses + squares, squares.detach()
