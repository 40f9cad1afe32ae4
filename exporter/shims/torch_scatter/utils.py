"""Indices of fewer dimensions, for all that they stand for."""

from torch import Tensor

__all__ = ["broadcast"]


def broadcast(src: Tensor, other: Tensor, dim: int) -> Tensor:
    """`src`, of one dimension, `dim` of `other`, or of its first ones, in the shape of other."""
    dim = dim % other.dim()
    if src.dim() == 1:
        src = src[(None,) * dim]
    return src[(...,) + (None,) * (other.dim() - src.dim())].expand(other.shape)
