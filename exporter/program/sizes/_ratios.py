"""Quotients of sizes in tensors, until they are rounded: `torch.ceil((length - k) / stride + 1)`.

Of one that is a floating number torch knows little; that of two whole numbers, rounded, is a whole
number. It is exact, as are those of tensors in float32 of whole numbers up to some millions.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import SymInt
from torch.fx.experimental.symbolic_shapes import statically_known_true

__all__ = ["Ratio", "over", "rounded", "whole"]


@dataclass(frozen=True, eq=False)
class Ratio:
    """A whole number, or a size, by a positive number.

    Attributes:
        of: the one.
        by: the other.
    """

    of: int | SymInt
    by: int

    def __add__(self, other: Any) -> Any:
        return Ratio(self.of + self.by * other, self.by) if _is_whole(other) else None

    def __sub__(self, other: Any) -> Any:
        return Ratio(self.of - self.by * other, self.by) if _is_whole(other) else None

    def __rsub__(self, other: Any) -> Any:
        return Ratio(self.by * other - self.of, self.by) if _is_whole(other) else None

    def __mul__(self, other: Any) -> Any:
        return Ratio(self.of * other, self.by) if _is_whole(other) else None

    __radd__, __rmul__ = __add__, __mul__

    def __eq__(self, other: object) -> bool:
        raise TypeError("only rounded it is compared")

    def number(self) -> Any:
        """What code reads of it: a number with a point, if it is whole; else None."""
        return torch.sym_float(self.of) if self.by == 1 else None


def over(a: Any, b: Any) -> Ratio | None:
    """That of two numbers, if the second is positive and no size."""
    return Ratio(a, b) if _is_whole(a) and type(b) is int and b > 0 else None


def rounded(name: str, x: Any) -> Any:
    """`ceil` or `floor` of one, as a ratio."""
    if not isinstance(x, Ratio):
        return None
    return Ratio(-(-x.of // x.by) if name == "ceil" else x.of // x.by, 1)


def whole(x: Any) -> Any:
    """What integers take it for: what is behind its point is cut off."""
    if not isinstance(x, Ratio):
        return x
    return x.of // x.by if x.by == 1 or statically_known_true(x.of >= 0) else None


def _is_whole(x: Any) -> bool:
    return type(x) in (int, SymInt) or isinstance(x, np.integer)
