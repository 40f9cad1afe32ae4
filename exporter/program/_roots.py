"""Roots of sizes, as scores are divided by: `math.sqrt(length)`.

Python's gives numbers alone, where a size to the power of 0.5 stays one in programs.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import SymFloat, SymInt

__all__ = ["roots"]


@contextmanager
def roots() -> Iterator[None]:
    """Have `math.sqrt` and `math.isqrt` leave dynamic sizes what they are."""
    number, whole = math.sqrt, math.isqrt

    def sqrt(x: Any, /) -> Any:
        return x**0.5 if isinstance(x, SymInt | SymFloat) else number(x)

    def isqrt(n: Any, /) -> Any:
        return torch.sym_int(n**0.5) if isinstance(n, SymInt) else whole(n)

    with mock.patch.multiple(math, sqrt=sqrt, isqrt=isqrt):
        yield
