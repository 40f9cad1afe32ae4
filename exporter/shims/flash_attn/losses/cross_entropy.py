"""The cross-entropy as a module."""

from typing import Any

from torch import Tensor, nn

from ..ops.triton.cross_entropy import cross_entropy_loss

__all__ = ["CrossEntropyLoss"]


class CrossEntropyLoss(nn.Module):
    """`cross_entropy_loss` of logits and labels.

    Args:
        ignore_index: the label of rows that do not count.
        reduction: "mean" of those that do, "sum" or "none".
        label_smoothing: ε, in 0 to 1.
        logit_scale: of the logits.
        lse_square_scale: c of c·z², which is added to each loss.
        inplace_backward: has no effect.
        process_group: must be None.
        return_z_loss: whether what of the loss is c·z² is returned too.

    Raises:
        NotImplementedError: the reduction is another one.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        logit_scale: float = 1.0,
        lse_square_scale: float = 0.0,
        inplace_backward: bool = False,
        process_group: Any = None,
        return_z_loss: bool = False,
    ) -> None:
        super().__init__()
        if reduction not in ("mean", "sum", "none"):
            raise NotImplementedError(f"reduction is {reduction!r}; it is mean, sum or none")
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.logit_scale = logit_scale
        self.lse_square_scale = lse_square_scale
        self.inplace_backward = inplace_backward
        self.process_group = process_group
        self.return_z_loss = return_z_loss

    def forward(self, input: Tensor, target: Tensor, precomputed_lse: Tensor | None = None) -> Any:
        """(n, V) and (n,) → a number, or (n,) for "none", float32 or float64."""
        losses, squares = cross_entropy_loss(
            input,
            target,
            precomputed_lse,
            self.label_smoothing,
            self.logit_scale,
            self.lse_square_scale,
            self.ignore_index,
            self.inplace_backward,
            self.process_group,
        )
        loss, of_squares = self._reduced(losses, target), self._reduced(squares, target)
        return (loss, of_squares) if self.return_z_loss else loss

    def _reduced(self, losses: Tensor, target: Tensor) -> Tensor:
        if self.reduction == "none":
            return losses
        total = losses.sum()
        if self.reduction == "sum":
            return total
        return total / (target != self.ignore_index).sum()
