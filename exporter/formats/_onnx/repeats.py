"""Rolls and repetitions by sizes, which torch.onnx takes for numbers: those of its example."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fuseport.exporter.program.instead import _by_values
from fuseport.exporter.program.rewriting import Table
from fuseport.exporter.program.sizes.bounds import may_be_none

__all__ = ["BY_SIZES"]

aten = torch.ops.aten


def _repeat_interleave(
    x: Tensor, repeats: int, dim: int | None = None, *, output_size: int | None = None
) -> Any:
    # Of none, ONNX Runtime's form takes a size of 0 for another.
    if isinstance(repeats, int) and not any(map(may_be_none, x.shape)):
        return NotImplemented
    if dim is None:
        x, dim = x.reshape(math.prod(x.shape)), 0
    dim %= x.dim()
    sizes, more = list(x.shape[: dim + 1]), list(x.shape[dim + 1 :])
    repeated = x.unsqueeze(dim + 1).expand([*sizes, repeats, *more])
    return repeated.reshape([*sizes[:dim], sizes[dim] * repeats, *more])


def _roll(x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
    numbers = all(isinstance(shift, int) for shift in shifts)
    return NotImplemented if numbers else _by_values.roll(x, shifts, dims)


BY_SIZES: Table = {
    aten.repeat_interleave.self_int: _repeat_interleave,
    aten.roll.default: _roll,
}
