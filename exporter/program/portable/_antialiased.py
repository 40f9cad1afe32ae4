"""Resizing by a filter as wide as what a pixel stands for, by operators that have derivatives.

As torch's `_upsample_bilinear2d_aa` and `_upsample_bicubic2d_aa`, which are Pillow's: a product
with a matrix for each axis. torch knows no derivative of theirs for sizes that are not numbers.
To one column and other rows torch, up to 2.13 at least, resizes wrongly; this does not.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["antialiased"]


def antialiased(taps: int) -> Callable[..., Tensor]:
    """Of images (b, c, h, w), to a size or by factors: bilinear with 2 taps, bicubic with 4."""

    def resize(
        x: Tensor,
        output_size: Sequence[int] | None,
        align_corners: bool,
        scale_factors: Sequence[float] | None = None,
    ) -> Tensor:
        for i, dim in enumerate((-2, -1)):
            scale = None if scale_factors is None else scale_factors[i]
            if output_size is not None:
                count = output_size[i]
            else:
                assert scale is not None
                count = torch.sym_int(x.shape[dim] * scale)
            shares = _shares(taps, x.shape[dim], count, align_corners, scale, x.device)
            shares = shares.to(x.dtype)
            x = torch.matmul(shares.mT, x) if dim == -2 else torch.matmul(x, shares)
        return x

    return resize


def _shares(
    taps: int, size: Any, count: Any, align_corners: bool, scale: float | None, device: torch.device
) -> Tensor:
    """(size, count): of each element of an axis, in each of the resized one."""

    def number(value: Any) -> Tensor:
        return torch.scalar_tensor(value, dtype=torch.float64, device=device)

    def middles(length: Any) -> Tensor:
        return (torch.arange(length, device=device) + 0.5).to(torch.float64)

    if align_corners:
        # Of one that is left, torch takes the first.
        last = number(count - 1)
        step = torch.where(last > 0, number(size - 1) / last.clamp(min=1), 0)
    else:
        step = number(1 / scale) if scale else number(size) / number(count)
    x = ((middles(size).unsqueeze(1) - middles(count) * step) / step.clamp(min=1)).abs()
    if taps == 2:
        shares = (1 - x).clamp(min=0)
    else:
        near = (1.5 * x - 2.5) * x * x + 1
        far = -0.5 * (((x - 5) * x + 8) * x - 4)
        shares = torch.where(x < 1, near, torch.where(x < 2, far, 0))
    return shares / shares.sum(0)
