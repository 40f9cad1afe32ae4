"""Ranges of numbers whose bounds are of several types, which torch.onnx hands to one Range."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["RANGES"]

aten = torch.ops.aten


def _arange(
    start: Any, end: Any, step: Any = 1, *, dtype: torch.dtype | None = None, **by: Any
) -> Any:
    """`arange(0.0, width)`: of whole numbers, made floating, or of floating ones alone."""
    given = (start, end, step)
    floating = [v for v in given if isinstance(v, float | torch.SymFloat)]
    if not floating or len(floating) == len(given):
        return NotImplemented
    found = torch.get_default_dtype() if dtype is None else dtype
    if all(isinstance(v, float) and v.is_integer() for v in floating):
        whole = [int(v) if isinstance(v, float) else v for v in given]
        count: Tensor = aten.arange.start_step(*whole, dtype=torch.int64, **by)
        return count.to(found)
    return aten.arange.start_step(*map(torch.sym_float, given), dtype=found, **by)


RANGES = {aten.arange.start: _arange, aten.arange.start_step: _arange}
"""What to take instead of such operators, in terms of others."""
