"""Exponentials of matrices, which ONNX has not."""

import math

import torch
from torch import Tensor

from fuseport.exporter.program.rewriting import Table

__all__ = ["EXPONENTIALS"]

aten = torch.ops.aten

_DEGREE = 18  # of a Taylor series that is right to 1/19! for what is not above 1
_SQUARINGS = 32  # a float64 of 2³² has no more than 6 digits behind its point


def _matrix_exp(x: Tensor) -> Tensor:
    """(…, n, n), by scaling and squaring in float64.

    As often as it was halved at first, a matrix is squared at the end; each of a batch by itself.
    Source: Higham, "Functions of Matrices", 10.3.
    """
    wide = x.to(torch.float64)
    size = (wide * wide).sum((-2, -1), keepdim=True).sqrt()
    times = torch.ceil(torch.log2(size.clamp(min=1))).clamp(max=_SQUARINGS)
    small = wide * torch.exp2(-times)
    places = torch.arange(x.shape[-1], device=x.device)
    one = (places[:, None] == places).to(torch.float64)
    *terms, before, last = [1 / math.factorial(i) for i in range(_DEGREE + 1)]
    # Not by a number each: ONNX Runtime takes factors of products of matrices for float32's.
    found = small * last + one * before
    for term in reversed(terms):
        found = torch.matmul(small, found) + one * term
    for i in range(_SQUARINGS):
        found = torch.where(times > i, torch.matmul(found, found), found)
    return found.to(x.dtype)


EXPONENTIALS: Table = {aten.linalg_matrix_exp.default: _matrix_exp}
