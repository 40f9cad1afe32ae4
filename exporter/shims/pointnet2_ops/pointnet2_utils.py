"""The functions by their public names, and the layers that group points."""

import torch
from torch import Tensor, nn

from fuseport.exporter.shims import _points

from . import _ext

__all__ = [
    "BallQuery",
    "FurthestPointSampling",
    "GatherOperation",
    "GroupAll",
    "GroupingOperation",
    "QueryAndGroup",
    "ThreeInterpolate",
    "ThreeNN",
    "ball_query",
    "furthest_point_sample",
    "gather_operation",
    "grouping_operation",
    "three_interpolate",
    "three_nn",
]


class FurthestPointSampling:
    """Called by `apply`, as the autograd functions of these names are; so the others below."""

    @staticmethod
    def apply(xyz: Tensor, npoint: int) -> Tensor:
        """(b, npoint), int32, of points (b, n, 3): see `_points.furthest_points`."""
        return _points.furthest_points(xyz, npoint)


class GatherOperation:
    """Features at places."""

    @staticmethod
    def apply(features: Tensor, idx: Tensor) -> Tensor:
        """(b, c, npoint) of features (b, c, n) at places (b, npoint)."""
        return _points.gathered(features, idx)


class ThreeNN:
    """The nearest points."""

    @staticmethod
    def apply(unknown: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        """Distances and indices, (b, n, 3), of the three known points next to each of n.

        Distances have no gradient.
        """
        squared, index = _ext.three_nn(unknown, known)
        return squared.sqrt(), index


class ThreeInterpolate:
    """Features between places."""

    @staticmethod
    def apply(features: Tensor, idx: Tensor, weight: Tensor) -> Tensor:
        """(b, c, n) of features (b, c, m) at places (b, n, 3); weights have no gradient."""
        return _points.interpolated(features, idx, weight)


class GroupingOperation:
    """Features of groups."""

    @staticmethod
    def apply(features: Tensor, idx: Tensor) -> Tensor:
        """(b, c, npoint, nsample) of features (b, c, n) at places (b, npoint, nsample)."""
        return _points.gathered(features, idx)


class BallQuery:
    """Points within a radius."""

    @staticmethod
    def apply(radius: float, nsample: int, xyz: Tensor, new_xyz: Tensor) -> Tensor:
        """(b, npoint, nsample), int32: see `_points.ball_query`."""
        return _points.ball_query(new_xyz, xyz, radius, nsample)


furthest_point_sample = FurthestPointSampling.apply
gather_operation = GatherOperation.apply
three_nn = ThreeNN.apply
three_interpolate = ThreeInterpolate.apply
grouping_operation = GroupingOperation.apply
ball_query = BallQuery.apply


class QueryAndGroup(nn.Module):
    """Points within a radius of centers, relative to these, and their features.

    Args:
        radius: of the ball.
        nsample: how many points there are in each group.
        use_xyz: whether the places are features, too.
    """

    def __init__(self, radius: float, nsample: int, use_xyz: bool = True) -> None:
        super().__init__()
        self.radius, self.nsample, self.use_xyz = radius, nsample, use_xyz

    def forward(self, xyz: Tensor, new_xyz: Tensor, features: Tensor | None = None) -> Tensor:
        """(b, [3 +] c, npoint, nsample) of (b, n, 3), (b, npoint, 3) and (b, c, n)."""
        index = ball_query(self.radius, self.nsample, xyz, new_xyz)
        places = grouping_operation(xyz.mT, index) - new_xyz.mT[..., None]
        if features is None:
            assert self.use_xyz, "there are neither features nor places to group"
            return places
        grouped = grouping_operation(features, index)
        return torch.cat([places, grouped], 1) if self.use_xyz else grouped


class GroupAll(nn.Module):
    """All points as one group.

    Args:
        use_xyz: whether the places are features, too.
    """

    def __init__(self, use_xyz: bool = True) -> None:
        super().__init__()
        self.use_xyz = use_xyz

    def forward(
        self, xyz: Tensor, new_xyz: Tensor | None, features: Tensor | None = None
    ) -> Tensor:
        """(b, [3 +] c, 1, n) of (b, n, 3), nothing and (b, c, n)."""
        places = xyz.mT[:, :, None]
        if features is None:
            return places
        grouped = features[:, :, None]
        return torch.cat([places, grouped], 1) if self.use_xyz else grouped
