"""Stands in for `pointnet2_ops`, PointNet++'s sampling, grouping and layers."""

from . import pointnet2_modules, pointnet2_utils

__all__ = ["pointnet2_modules", "pointnet2_utils"]
