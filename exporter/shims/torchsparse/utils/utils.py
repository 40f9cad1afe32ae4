"""Numbers for each dimension."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["make_divisible", "make_ntuple", "make_tensor"]


def make_ntuple(x: Any, ndim: int) -> tuple[int, ...]:
    """A number, or several, as one for each dimension."""
    if isinstance(x, Tensor):
        x = x.flatten().tolist()
    found = (x,) * ndim if isinstance(x, int) else tuple(x)
    assert len(found) == ndim, found
    return found


def make_tensor(x: tuple[int, ...], dtype: torch.dtype, device: Any) -> Tensor:
    """They as a tensor."""
    return torch.tensor(x, dtype=dtype, device=device)


def make_divisible(x: int, divisor: int) -> int:
    """The number of divisors that x takes."""
    return (x + divisor - 1) // divisor * divisor
