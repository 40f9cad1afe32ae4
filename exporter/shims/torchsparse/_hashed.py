"""Hashes of coordinates, and rows by them."""

import torch
from torch import Tensor

__all__ = ["found", "hashed"]

# FNV-1a of 64 bits, of which the offset is given as a signed number.
_OFFSET = 14695981039346656037 - 2**64
_PRIME = 1099511628211
_LOW = 2**60 - 1


def hashed(rows: Tensor) -> Tensor:
    """(…,), int64: of rows (…, 4), int32, as `cpu_hash_wrapper` in backend/hash/hash_cpu.cpp."""
    number = torch.full_like(rows[..., 0], _OFFSET, dtype=torch.int64)
    for column in rows.unbind(-1):
        number = (number ^ (column.long() & 0xFFFFFFFF)) * _PRIME
    return ((number >> 60) & 15) ^ (number & _LOW)


def found(keys: Tensor, known: Tensor) -> Tensor:
    """(…,), int32: which of known, (n,), each key is; -1 of none."""
    ordered, order = known.sort(stable=True)
    place = torch.searchsorted(ordered, keys)
    ordered = torch.cat([ordered, ordered.new_full((1,), -1)])  # which no hash is
    order = torch.cat([order, order.new_zeros((1,))])
    return torch.where(ordered[place] == keys, order[place], -1).int()
