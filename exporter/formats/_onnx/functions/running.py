"""The largest and the smallest values so far along a dimension, which ONNX has not."""

from collections.abc import Callable

import torch
from torch import Tensor

from fuseport.exporter.program.rewriting import Table

__all__ = ["RUNNING"]

aten = torch.ops.aten

_MOST = 2**31  # of a dimension's size, where that is no number


def _cummax(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    return _so_far(x, dim, torch.ge)


def _cummin(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    return _so_far(x, dim, torch.le)


def _so_far(
    x: Tensor, dim: int, beats: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Values and places: of equal ones the last, and of NaN, which none beats.

    In steps that double how many each has seen, as Hillis and Steele add up. Places before the
    first are that, which has seen nothing else.
    """
    if x.dim() == 0:
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    value = x.to(torch.int32) if x.dtype == torch.bool else x
    size = x.shape[dim]
    every = torch.arange(size, device=x.device)
    shape = [1] * x.dim()
    shape[dim] = -1
    place = every.reshape(shape).expand(x.shape)
    step = 1
    while step < (size if isinstance(size, int) else _MOST):
        before = (every - step).clamp(min=0)
        old, older = (each.index_select(dim, before) for each in (value, place))
        kept = beats(value, old)
        if x.is_floating_point():
            kept = value.isnan() | (kept & ~old.isnan())
        value, place = torch.where(kept, value, old), torch.where(kept, place, older)
        step *= 2
    return value.to(x.dtype), place


RUNNING: Table = {aten.cummax.default: _cummax, aten.cummin.default: _cummin}
