"""Stands in for `xentropy_cuda_lib`, flash-attention's extension for the cross-entropy.

Its `flash_attn.losses.cross_entropy` called it before version 2.5, and copies of that do, as
TinyLlama's and Samba's.
"""

import torch
from torch import Tensor

from fuseport.exporter.shims._dtypes import wide

__all__ = ["backward", "forward"]


def forward(
    logits: Tensor, labels: Tensor, smoothing: float, total_classes: int = -1
) -> list[Tensor]:
    """`[losses, lse]`, (n,) each, float32 or wider.

    With z = log Σ exp(logits), a loss is (1-ε)·(z - logit of the label) + ε·(z - Σ logits / total).
    Of a label that is none of these classes, as of classes that another process has, the first term
    is 0.

    Args:
        logits: (n, V).
        labels: (n,), integers.
        smoothing: ε, in 0 to 1.
        total_classes: V of all processes; -1 where there is one.
    """
    value = logits.to(wide(logits))
    lse = value.logsumexp(1)
    known, at = _labels(labels, logits)
    chosen = value.gather(1, at[:, None]).squeeze(1)
    losses = torch.where(known, lse - chosen, 0.0)
    if smoothing:
        even = lse - value.sum(1) / _classes(logits, total_classes)
        losses = (1 - smoothing) * losses + smoothing * even
    return [losses, lse]


def backward(
    grad_loss: Tensor,
    logits: Tensor,
    lse: Tensor,
    labels: Tensor,
    smoothing: float,
    inplace: bool,
    total_classes: int = -1,
) -> Tensor:
    """The gradient of the logits, in their dtype; in their place if `inplace`.

    It is that of the sum over all processes, whose log-sum-exp `lse` is: exp(logits - lse) less
    (1-ε) at the label, and less ε / total everywhere.
    """
    share = (logits.to(lse.dtype) - lse[:, None]).exp()
    known, at = _labels(labels, logits)
    target = torch.zeros_like(share).scatter(1, at[:, None], known[:, None].to(share.dtype))
    even = smoothing / _classes(logits, total_classes)
    found = grad_loss[:, None] * (share - (1 - smoothing) * target - even)
    return logits.copy_(found) if inplace else found.to(logits.dtype)


def _labels(labels: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Which labels are classes of the logits, and their places, 0 for others."""
    known = (labels >= 0) & (labels < logits.shape[1])
    return known, torch.where(known, labels, 0).long()


def _classes(logits: Tensor, total_classes: int) -> int:
    return logits.shape[1] if total_classes == -1 else total_classes
