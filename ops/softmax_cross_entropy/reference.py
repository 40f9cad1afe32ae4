"""The loss in plain torch, forward and backward: what the kernels are held against.

Any device, and any dtype that the op takes; in float64 it is the truth of a verification. With z a
row of logits less its largest, t its target, and total = Σ_j exp(z_j):

    loss = log(total) - (1 - ε)·z_t - ε·mean(z)
    dlogits = dloss·(exp(z) / total - (1 - ε)·[j = t] - ε/V)

Of the log-sum-exp largest and total are saved: their sum would lose digits of log(total).
"""

import torch
from torch import Tensor

from fuseport.ops.rms_norm.reference import contiguous
from fuseport.ops.rms_norm.shapes import wide
from fuseport.ops.softmax_cross_entropy.shapes import check, check_backward, check_targets

__all__ = ["softmax_cross_entropy", "softmax_cross_entropy_backward"]


def softmax_cross_entropy(
    logits: Tensor, targets: Tensor, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, 0 where ignored, and the saved largest and total: (n,), in the wide dtype."""
    check("softmax_cross_entropy", logits, targets, label_smoothing)
    check_targets("softmax_cross_entropy", targets, logits.shape[1], ignore_index)
    x = logits.to(wide(logits.dtype))
    largest = x.detach().amax(1)
    z = x - largest[:, None]
    total = z.exp().sum(1)
    ignored = targets == ignore_index
    chosen = z.gather(1, torch.where(ignored, 0, targets)[:, None])[:, 0]
    aim = (1 - label_smoothing) * chosen
    if label_smoothing > 0:  # else classes ruled out by -Inf would count
        aim = aim + label_smoothing * z.mean(1)
    losses = torch.where(ignored, 0, total.log() - aim)
    return losses, largest, total.detach()


def softmax_cross_entropy_backward(
    dlosses: Tensor,
    logits: Tensor,
    targets: Tensor,
    largest: Tensor,
    total: Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    """dlogits, in the dtype of the logits."""
    check("softmax_cross_entropy_backward", logits, targets, label_smoothing)
    check_backward("softmax_cross_entropy_backward", dlosses, logits, largest, total)
    classes = logits.shape[1]
    check_targets("softmax_cross_entropy_backward", targets, classes, ignore_index)
    ignored = (targets == ignore_index)[:, None]
    index = torch.where(ignored, 0, targets[:, None])
    aim = torch.full_like(logits, label_smoothing / classes, dtype=total.dtype)
    aim = aim.scatter_add(1, index, torch.full_like(index, 1, dtype=total.dtype) - label_smoothing)
    softmax = (logits.to(total.dtype) - largest[:, None]).exp() / total[:, None]
    gradient = torch.where(ignored, 0, dlosses[:, None] * (softmax - aim))
    return contiguous(gradient.to(logits.dtype))
