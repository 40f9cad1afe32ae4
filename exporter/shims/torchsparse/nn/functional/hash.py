"""Coordinates as numbers, and rows by these."""

import torch
from torch import Tensor

from ..._hashed import found, hashed

__all__ = ["sphash", "sphashquery"]


def sphash(coords: Tensor, offsets: Tensor | None = None) -> Tensor:
    """(n,), int64, of rows (n, 4), int32; or (K, n), of rows moved by offsets, (K, 3).

    Offsets are added to the first three columns.
    """
    assert coords.dtype == torch.int, coords.dtype
    assert coords.ndim == 2, coords.shape
    assert coords.shape[1] == 4, coords.shape
    if offsets is None:
        return hashed(coords)
    assert offsets.dtype == torch.int, offsets.dtype
    moves = torch.cat([offsets, torch.zeros_like(offsets[:, :1])], 1)
    return hashed(coords + moves[:, None])


def sphashquery(queries: Tensor, references: Tensor) -> Tensor:
    """(…,), int32: which of references, (n,), each query is; -1 of none."""
    return found(queries, references)
