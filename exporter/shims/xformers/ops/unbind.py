"""Parts of a tensor, and tensors as parts of one."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["stack_or_none", "unbind"]


def unbind(x: Tensor, dim: int) -> tuple[Tensor, ...]:
    """`torch.unbind`."""
    return torch.unbind(x, dim)


def stack_or_none(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """`torch.stack`, also of tensors that do not share memory."""
    return torch.stack(tuple(tensors), dim)
