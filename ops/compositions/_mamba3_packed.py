"""Sequences that are packed one after another, as the scan of Mamba-3 takes them.

Without states they stay one row, which the scan knows the sequences of. With states each becomes a
row of its own: steps of size 0 after its end change no state.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fuseport.ops.packed import Packed

__all__ = ["Rows", "Sequences"]


@dataclass(frozen=True)
class Sequences:
    """Of l steps in one row.

    Attributes:
        sequence: (l,), int32, by which sequences differ; steps after the last one are of it.
        is_last: (l,), whether another one begins after the step.
    """

    sequence: Tensor
    is_last: Tensor

    @classmethod
    def of(cls, cu_seqlens: Tensor, steps: int) -> "Sequences":
        """By where sequences begin, and the end of the last."""
        packed = Packed.of(cu_seqlens, steps)
        return cls(packed.sequence.int(), packed.to_go == 0)

    def index(self, ranks: int) -> Tensor:
        """(1, l·R): the sequence of each of R steps for one."""
        return self.sequence[:, None].expand(-1, ranks).reshape(1, -1)


@dataclass(frozen=True)
class Rows:
    """S rows of l steps, each one sequence and then nothing.

    Attributes:
        steps: (S, l), int64, where they are packed.
        ends: (S,), how many are of the sequence.
        places: of each packed step its row, and its place there.
    """

    steps: Tensor
    ends: Tensor
    places: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, cu_seqlens: Tensor, steps: int) -> "Rows":
        """By where sequences begin, and the end of the last."""
        starts, packed = cu_seqlens.long(), Packed.of(cu_seqlens, steps)
        step = torch.arange(steps, device=starts.device)
        inside = (starts[:-1, None] + step).clamp(max=steps - 1)
        return cls(inside, starts[1:] - starts[:-1], (packed.sequence, packed.from_start))

    def taken(self, t: Tensor, dim: int) -> Tensor:
        """`t` of one row, its steps along `dim`, in S rows."""
        taken = t[0].index_select(dim - 1, self.steps.flatten())
        by_row: Tensor = taken.unflatten(dim - 1, self.steps.shape)
        return by_row.movedim(dim - 1, 0)

    def masked(self, t: Tensor) -> Tensor:
        """`t`, (S, H, l), with 0 after the ends."""
        step = torch.arange(self.steps.shape[1], device=t.device)
        return t.masked_fill((step >= self.ends[:, None])[:, None], 0.0)

    def packed(self, t: Tensor) -> Tensor:
        """(S, l, …) back in one row, (1, l, …)."""
        return t[self.places].unsqueeze(0)

    def last(self, t: Tensor, before: Tensor | None) -> Tensor:
        """The last step of each sequence of (S, l, …); of empty ones what was before, or zeros."""
        index = (self.ends - 1).clamp(min=0)
        last = t[torch.arange(t.shape[0], device=t.device), index]
        empty = (self.ends == 0).view(-1, *[1] * (last.dim() - 1))
        return torch.where(
            empty, torch.zeros_like(last) if before is None else before.to(t.dtype), last
        )
