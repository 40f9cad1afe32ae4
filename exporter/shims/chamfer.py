"""Stands in for `chamfer`, how far two point clouds are apart."""

from torch import Tensor

from fuseport.exporter.shims import _points

__all__ = ["backward", "forward"]


def forward(xyz1: Tensor, xyz2: Tensor) -> list[Tensor]:
    """Of each point, how far the nearest of the other cloud is, squared, and which that is.

    Distances are (b, n) and (b, m), as are the indices, int32, of points (b, n, 3) and (b, m, 3).
    """
    of_1, of_2 = (_points.nearest(*pair, 1)[1][..., 0] for pair in ((xyz1, xyz2), (xyz2, xyz1)))
    pairs = ((xyz1, xyz2, of_1), (xyz2, xyz1, of_2))
    squared = [(of - _there(to, index)).square().sum(-1) for of, to, index in pairs]
    return [*squared, of_1, of_2]


def backward(
    xyz1: Tensor, xyz2: Tensor, idx1: Tensor, idx2: Tensor, grad_dist1: Tensor, grad_dist2: Tensor
) -> list[Tensor]:
    """The gradients of both, by those of the distances, (b, n) and (b, m)."""
    of_1 = 2 * grad_dist1[..., None] * (xyz1 - _there(xyz2, idx1))
    of_2 = 2 * grad_dist2[..., None] * (xyz2 - _there(xyz1, idx2))
    return [
        of_1 - _points.scattered(of_2.mT, idx2, xyz1.shape[1]).mT,
        of_2 - _points.scattered(of_1.mT, idx1, xyz2.shape[1]).mT,
    ]


def _there(xyz: Tensor, index: Tensor) -> Tensor:
    return _points.gathered(xyz.mT, index).mT
