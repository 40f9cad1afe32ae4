"""Roots of sizes, as scores are divided by: `math.sqrt(length)`.

Python's gives numbers alone, where a size to the power of 0.5 stays one in programs.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import SymFloat, SymInt

__all__ = ["roots"]


@contextmanager
def roots() -> Iterator[None]:
    """Have `math.sqrt` leave dynamic sizes what they are."""
    number = math.sqrt

    def sqrt(x: Any, /) -> Any:
        return x**0.5 if isinstance(x, SymInt | SymFloat) else number(x)

    with mock.patch.object(math, "sqrt", sqrt):
        yield
