"""The logarithm of sums of exponentials."""

from torch import Tensor

from .._scatter import scatter_max, scatter_sum
from ..utils import broadcast
from .softmax import refuse_integers

__all__ = ["scatter_logsumexp"]


def scatter_logsumexp(
    src: Tensor,
    index: Tensor,
    dim: int = -1,
    out: Tensor | None = None,
    dim_size: int | None = None,
    eps: float = 1e-12,
) -> Tensor:
    """Of src, (…, n, …), log Σ exp of each group, (…, dim_size, …); 0 where there is nothing.

    Args:
        src: of a floating dtype.
        index: as in `scatter`.
        dim: as in `scatter`.
        out: must be None.
        dim_size: as in `scatter`.
        eps: added to sums of exponentials that are relative to the largest.

    Raises:
        NotImplementedError: out is given.
        ValueError: src is of integers.
    """
    refuse_integers(src, "scatter_logsumexp")
    if out is not None:
        raise NotImplementedError(
            "torch_scatter's scatter_logsumexp was called with out, which fuseport's stand-in does "
            "not write to: call it with dim_size=out.size(dim), and torch.logaddexp"
        )
    index = broadcast(index, src, dim)
    largest, places = scatter_max(src.detach(), index, dim, dim_size=dim_size)
    powers = (src - largest.gather(dim, index)).exp()
    sums = scatter_sum(powers, index, dim, dim_size=largest.shape[dim])
    found = (sums + eps).log() + largest
    return found.masked_fill(places == src.shape[dim], 0.0)
