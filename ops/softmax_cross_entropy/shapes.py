"""What the inputs of the loss must be, and the shapes, dtypes and strides of its outputs.

`torch.cpp` has the same checks in the same order with the same messages, for hosts that have no
Python. What targets hold is for references and kernels to check: a fake does not know it. All
outputs are contiguous, whatever the inputs are.
"""

import torch
from torch import Tensor

from fuseport.ops.checks import dtype_name, require, require_like, require_shape
from fuseport.ops.rms_norm.shapes import flat, wide
from fuseport.ops.spec import FLOATING

__all__ = ["check", "check_backward", "check_targets", "fake_loss", "fake_loss_backward"]


def check(op: str, logits: Tensor, targets: Tensor, label_smoothing: float) -> None:
    """Raises ValueError, naming `op` and the argument, unless the inputs fit each other."""
    require(logits.dim() == 2, op, "logits", "(n, V)", tuple(logits.shape))
    known = "float16, bfloat16, float32 or float64"
    require(logits.dtype in FLOATING, op, "logits", known, dtype_name(logits.dtype))
    n, classes = logits.shape
    require(classes >= 1, op, "logits", "of one class or more", tuple(logits.shape))
    require_like(op, "targets", targets, torch.int64, logits, "logits")
    require_shape(op, "targets", targets, "(n,)", (n,))
    within = 0 <= label_smoothing <= 1
    require(within, op, "label_smoothing", "in 0 to 1", format(label_smoothing, "g"))


def check_targets(op: str, targets: Tensor, classes: int, ignore_index: int) -> None:
    """Raises ValueError, with the first of them, if targets are neither classes nor ignored."""
    wrong = ((targets < 0) | (targets >= classes)) & (targets != ignore_index)
    if bool(wrong.any()):
        wanted = f"in 0 to {classes - 1}, or ignore_index = {ignore_index}"
        require(False, op, "targets", wanted, int(targets[wrong][0]))


def check_backward(
    op: str, dlosses: Tensor, logits: Tensor, largest: Tensor, total: Tensor
) -> None:
    """Raises ValueError unless cotangent and saved outputs fit inputs that passed `check`."""
    for name, t in (("dlosses", dlosses), ("largest", largest), ("total", total)):
        require_like(op, name, t, wide(logits.dtype), logits, "logits")
        require_shape(op, name, t, "(n,)", (logits.shape[0],))


def fake_loss(
    logits: Tensor, targets: Tensor, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Empty outputs of `fuseport::softmax_cross_entropy`."""
    check("softmax_cross_entropy", logits, targets, label_smoothing)
    losses = logits.new_empty(logits.shape[0], dtype=wide(logits.dtype))
    return losses, flat(losses), flat(losses)


def fake_loss_backward(
    dlosses: Tensor,
    logits: Tensor,
    targets: Tensor,
    largest: Tensor,
    total: Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    """The empty output of `fuseport::softmax_cross_entropy_backward`."""
    check("softmax_cross_entropy_backward", logits, targets, label_smoothing)
    check_backward("softmax_cross_entropy_backward", dlosses, logits, largest, total)
    return flat(logits)
