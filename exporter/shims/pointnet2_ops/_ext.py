"""The functions of the extension, with their backward passes."""

from torch import Tensor

from fuseport.exporter.shims import _points

__all__ = [
    "ball_query",
    "furthest_point_sampling",
    "gather_points",
    "gather_points_grad",
    "group_points",
    "group_points_grad",
    "three_interpolate",
    "three_interpolate_grad",
    "three_nn",
]

furthest_point_sampling = _points.furthest_points
ball_query = _points.ball_query
gather_points = group_points = _points.gathered
gather_points_grad = group_points_grad = _points.scattered
three_interpolate = _points.interpolated


def three_nn(unknown: Tensor, known: Tensor) -> list[Tensor]:
    """Squared distances and indices, (b, n, 3), of the three known points next to each of n."""
    return [*_points.nearest(unknown, known, 3)]


def three_interpolate_grad(grad: Tensor, index: Tensor, weight: Tensor, size: int) -> Tensor:
    """(b, c, size): the gradient of features by that of `three_interpolate`, (b, c, n)."""
    return _points.scattered(grad[..., None] * weight[:, None], index, size)
