"""Slopes along dimensions of which torch takes the sizes for numbers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["gradient"]


def gradient(
    input: Tensor, *, spacing: Any = 1, dim: Any = None, edge_order: int = 1
) -> tuple[Tensor, ...]:
    """As `torch.gradient` has it: one tensor for each dimension."""
    dims = [dim] if isinstance(dim, int) else range(input.dim()) if dim is None else dim
    one = 1 if spacing is None else spacing
    spacings = one if isinstance(one, Sequence) else [one] * len(dims)
    return tuple(
        _slope(input.movedim(at, -1), space, edge_order).movedim(-1, at)
        for at, space in zip(dims, spacings, strict=True)
    )


def _slope(x: Tensor, spacing: Any, edge_order: int) -> Tensor:
    """Along the last dimension: of the parabola through three values, or at the ends of the line
    through two, unless `edge_order` is 2.
    """
    torch._check(x.shape[-1] > edge_order)
    gaps = spacing.diff() if isinstance(spacing, Tensor) else spacing
    before, after = (gaps[:-1], gaps[1:]) if isinstance(gaps, Tensor) else (gaps, gaps)
    lines = x.diff() / gaps
    left, right = lines[..., :-1], lines[..., 1:]
    inner = (after * left + before * right) / (before + after)
    first, last = lines[..., :1], lines[..., -1:]
    if edge_order == 2:
        bend = (right - left) / (before + after)
        first = (left - before * bend)[..., :1]
        last = (right + after * bend)[..., -1:]
    return torch.cat([first, inner, last], -1)
