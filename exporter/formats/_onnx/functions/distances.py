"""Distances of all pairs of rows, which ONNX lacks: from the differences themselves.

torch takes ‖x‖² + ‖y‖² less 2 x·y for 2-norms of more than 25 rows, which rounds more where rows
are near each other.
"""

import math

import torch
from torch import Tensor

from fuseport.exporter.program.rewriting import Table

__all__ = ["DISTANCES"]

aten = torch.ops.aten


def _cdist(x: Tensor, y: Tensor, p: float, compute_mode: int | None = None) -> Tensor:
    """(…, m, d), (…, n, d) → (…, m, n)"""
    off = (x.unsqueeze(-2) - y.unsqueeze(-3)).abs()
    if p == 0:
        return (off != 0).to(x.dtype).sum(-1)
    if p == 1:
        return off.sum(-1)
    if p == 2:
        return (off * off).sum(-1).sqrt()
    return off.amax(-1) if math.isinf(p) else off.pow(p).sum(-1).pow(1 / p)


def _cdist_backward(cotangent: Tensor, x: Tensor, y: Tensor, p: float, distance: Tensor) -> Tensor:
    """Of the first input; zero where a distance is, as torch has it."""
    off = x.unsqueeze(-2) - y.unsqueeze(-3)
    distance, cotangent = distance.unsqueeze(-1), cotangent.unsqueeze(-1)
    if p == 0:
        return torch.zeros_like(x)
    if p == 1:
        slope = off.sign()
    elif math.isinf(p):
        slope = off.sign() * (off.abs() == distance).to(off.dtype)
    else:
        some = distance != 0
        whole = torch.where(some, distance, 1)
        if p == 2:
            slope = off / whole
        else:  # of a difference of 0, a power below 0 is none
            size = torch.where(off == 0, 1, off.abs())
            slope = torch.where(off == 0, 0, off.sign() * (size / whole).pow(p - 1))
        slope = torch.where(some, slope, 0)
    return (cotangent * slope).sum(-2)


DISTANCES: Table = {
    aten._cdist_forward.default: _cdist,
    aten._cdist_backward.default: _cdist_backward,
}
