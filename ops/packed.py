"""Where steps are in sequences that are packed one after another."""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Packed"]


@dataclass(frozen=True)
class Packed:
    """Of each of n steps, int64 but for the last.

    Attributes:
        sequence: (n,), which sequence it is in; the last one for steps after the end.
        from_start: (n,), its place there, from 0; 0 for steps after the end.
        to_go: (n,), how many of the sequence come after it.
        is_inside: (n,), whether it is before the end of the last sequence.
    """

    sequence: Tensor
    from_start: Tensor
    to_go: Tensor
    is_inside: Tensor

    def begins(self) -> Tensor:
        """(n,), whether a step is the first of its sequence."""
        return self.from_start == 0

    @classmethod
    def of(cls, starts: Tensor, steps: int) -> "Packed":
        """By where sequences begin, and the end of the last: `starts`, (b + 1,), integers."""
        starts = starts.long()
        step = torch.arange(steps, device=starts.device)
        ends = starts[1:]
        passed = (step[:, None] >= ends).sum(1)  # empty sequences too: of equal ends the last
        is_inside = passed < ends.shape[0]
        sequence = passed.clamp(max=ends.shape[0] - 1)
        from_start = (step - starts[sequence]).masked_fill(~is_inside, 0)
        return cls(sequence, from_start, ends[sequence] - 1 - step, is_inside)
