"""The four pixels around a point of a map, and how much of each a bilinear sample takes."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Corner", "corners"]


@dataclass(frozen=True)
class Corner:
    """One of the four pixels around each of many points.

    Attributes:
        index: of the pixel in the map, row by row; -1 where it is outside.
        weight: in the sample, whether the pixel is outside or not.
        slope_x: the derivative of weight with respect to x.
        slope_y: likewise.
    """

    index: Tensor
    weight: Tensor
    slope_x: Tensor
    slope_y: Tensor


def corners(x: Tensor, y: Tensor, width: Tensor | int, height: Tensor | int) -> Iterator[Corner]:
    """Upper left, upper right, lower left and lower right, for points in units of pixels.

    Pixel (0, 0) has its centre at (0, 0). A point that is a pixel or more outside, or no number,
    has all its corners outside; weights are differentiable in x and y.
    """
    inside = (x > -1) & (y > -1) & (x < width) & (y < height)
    x, y = torch.where(inside, x, 0), torch.where(inside, y, 0)
    left, top = x.detach().floor(), y.detach().floor()
    shares_x = (1 - (x - left), x - left)
    shares_y = (1 - (y - top), y - top)
    first_column, first_row = left.long(), top.long()
    for below in (0, 1):
        for right in (0, 1):
            column, row = first_column + right, first_row + below
            within = (column >= 0) & (column < width) & (row >= 0) & (row < height)
            yield Corner(
                torch.where(inside & within, row * width + column, -1),
                shares_y[below] * shares_x[right],
                shares_y[below] if right else -shares_y[below],
                shares_x[right] if below else -shares_x[right],
            )
