"""Stands in for `knn_cuda`, which finds nearest neighbours."""

from torch import Tensor, nn

from fuseport.exporter.shims import _points

__all__ = ["KNN", "knn"]


def knn(ref: Tensor, query: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Distances and indices, (k, m), of what is next to `query`, (c, m), in `ref`, (c, n).

    The nearest are first; indices are int64. Neither has a gradient.
    """
    squared, index = _points.nearest(query.T[None], ref.T[None], k)
    return squared[0].sqrt().T, index[0].long().T


class KNN(nn.Module):
    """The same for a batch.

    Args:
        k: how many neighbours.
        transpose_mode: whether points are (b, n, c) and results (b, m, k), and not (b, c, n) and
            (b, k, m).
    """

    def __init__(self, k: int, transpose_mode: bool = False) -> None:
        super().__init__()
        self.k = k
        self._t = transpose_mode

    def forward(self, ref: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        """Distances and indices, (b, k, m), of `ref`, (b, c, n), and `query`, (b, c, m)."""
        if not self._t:
            ref, query = ref.mT, query.mT
        squared, index = _points.nearest(query, ref, self.k)
        found = squared.sqrt(), index.long()
        return found if self._t else (found[0].mT.contiguous(), found[1].mT.contiguous())
