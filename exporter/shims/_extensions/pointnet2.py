"""Stands in for `pointnet2_batch_cuda` and `pointnet2_cuda`, of OpenPCDet and openpoints.

Its functions are given sizes, tensors, and last what they write their results to, gradients added
to what is there. Points are (b, n, 3), features (b, c, n), and indices int32; see `_points`. Of
points none is taken for padding here.
"""

from torch import Tensor

from fuseport.exporter.shims import _points

__all__ = [
    "ball_query_wrapper",
    "furthest_point_sampling_wrapper",
    "gather_points_grad_wrapper",
    "gather_points_wrapper",
    "group_points_grad_wrapper",
    "group_points_wrapper",
    "three_interpolate_grad_wrapper",
    "three_interpolate_wrapper",
    "three_nn_wrapper",
]


def furthest_point_sampling_wrapper(
    b: int, n: int, m: int, points: Tensor, temp: Tensor, idx: Tensor
) -> None:
    """Writes which points, m of n, are furthest from one another to `idx`, (b, m)."""
    idx.copy_(_points.furthest_points(points, m, padded=False))


def ball_query_wrapper(
    b: int, n: int, m: int, radius: float, nsample: int, new_xyz: Tensor, xyz: Tensor, idx: Tensor
) -> None:
    """Writes the points within a radius of each of m centers to `idx`, (b, m, nsample)."""
    idx.copy_(_points.ball_query(new_xyz, xyz, radius, nsample))


def group_points_wrapper(
    b: int, c: int, n: int, npoints: int, nsample: int, points: Tensor, idx: Tensor, out: Tensor
) -> None:
    """Writes the features at places (b, npoints, nsample) to `out`, (b, c, npoints, nsample)."""
    out.copy_(_points.gathered(points, idx))


def group_points_grad_wrapper(
    b: int, c: int, n: int, npoints: int, nsample: int, grad: Tensor, idx: Tensor, of: Tensor
) -> None:
    """Adds their gradient, by that of `out`, to `of`, (b, c, n)."""
    of.add_(_points.scattered(grad, idx, of.shape[2]))


def gather_points_wrapper(
    b: int, c: int, n: int, npoints: int, points: Tensor, idx: Tensor, out: Tensor
) -> None:
    """Writes the features at places (b, npoints) to `out`, (b, c, npoints)."""
    out.copy_(_points.gathered(points, idx))


def gather_points_grad_wrapper(
    b: int, c: int, n: int, npoints: int, grad: Tensor, idx: Tensor, of: Tensor
) -> None:
    """Adds their gradient, by that of `out`, to `of`, (b, c, n)."""
    of.add_(_points.scattered(grad, idx, of.shape[2]))


def three_nn_wrapper(
    b: int, n: int, m: int, unknown: Tensor, known: Tensor, dist2: Tensor, idx: Tensor
) -> None:
    """Writes squared distances and indices, (b, n, 3), of the three known points next to each."""
    squared, index = _points.nearest(unknown, known, 3)
    dist2.copy_(squared)
    idx.copy_(index)


def three_interpolate_wrapper(
    b: int, c: int, m: int, n: int, points: Tensor, idx: Tensor, weight: Tensor, out: Tensor
) -> None:
    """Writes features (b, c, n), between those of m points, to `out`."""
    out.copy_(_points.interpolated(points, idx, weight))


def three_interpolate_grad_wrapper(
    b: int, c: int, n: int, m: int, grad: Tensor, idx: Tensor, weight: Tensor, of: Tensor
) -> None:
    """Adds the gradient of the features of m points, by that of `out`, to `of`, (b, c, m)."""
    of.add_(_points.scattered(grad[..., None] * weight[:, None], idx, of.shape[2]))
