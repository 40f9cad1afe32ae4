"""Looking up a window of a row at any place, linear between its elements and zero outside."""

import torch
from torch import Tensor

__all__ = ["between", "taps"]


def taps(centres: Tensor, radius: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where a window lies in a row of `size`: it has 2·radius + 2 elements in all.

    Args:
        centres: (…,), in elements.

    Returns:
        The elements' indices, (…, 2·radius + 2), those outside moved in; which are inside; and how
        far behind an element the centres lie, (…,), from 0 to 1.
    """
    before = centres.floor()
    # Clamped before they are integers: centres may be larger than these.
    start = before.clamp(-radius - 2, size + radius + 1).long() - radius
    index = start.unsqueeze(-1) + torch.arange(2 * radius + 2, device=centres.device)
    return index.clamp(0, size - 1), (index >= 0) & (index < size), centres - before


def between(values: Tensor, fraction: Tensor, dim: int) -> Tensor:
    """Elements and their successors along `dim`, weighted: one less."""
    count = values.shape[dim] - 1
    return values.narrow(dim, 0, count) * (1 - fraction) + values.narrow(dim, 1, count) * fraction
