"""Attention as a custom op of torch's, which is the same."""

from .functional import na1d, na2d, na3d

__all__ = ["na1d", "na2d", "na3d"]
