"""Softmax within groups."""

from torch import Tensor

from .._scatter import scatter_max, scatter_sum
from ..utils import broadcast

__all__ = ["refuse_integers", "scatter_log_softmax", "scatter_softmax"]


def scatter_softmax(
    src: Tensor, index: Tensor, dim: int = -1, dim_size: int | None = None
) -> Tensor:
    """Of src, (…, n, …), of a floating dtype, the softmax within each group, of src's shape.

    Raises:
        ValueError: src is of integers.
    """
    refuse_integers(src, "scatter_softmax")
    index = broadcast(index, src, dim)
    largest = scatter_max(src.detach(), index, dim, dim_size=dim_size)[0]
    powers = (src - largest.gather(dim, index)).exp()
    sums = scatter_sum(powers, index, dim, dim_size=largest.shape[dim])
    return powers / sums.gather(dim, index)


def scatter_log_softmax(
    src: Tensor, index: Tensor, dim: int = -1, eps: float = 1e-12, dim_size: int | None = None
) -> Tensor:
    """The logarithm of `scatter_softmax`, with eps added to sums."""
    refuse_integers(src, "scatter_log_softmax")
    index = broadcast(index, src, dim)
    largest = scatter_max(src.detach(), index, dim, dim_size=dim_size)[0]
    centred = src - largest.gather(dim, index)
    sums = scatter_sum(centred.exp(), index, dim, dim_size=largest.shape[dim])
    return centred - (sums + eps).log().gather(dim, index)


def refuse_integers(src: Tensor, name: str) -> None:
    """Raises ValueError if src is of no floating dtype."""
    if not src.is_floating_point():
        raise ValueError(f"torch_scatter: {name} is of floating dtypes, and src is {src.dtype}")
