"""Where versions before 0.17 have their layer of 3 dimensions."""

from .modules import NeighborhoodAttention3D

__all__ = ["NeighborhoodAttention3D"]
