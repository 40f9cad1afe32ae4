"""Where versions before 0.17 have their layer of one dimension."""

from .modules import NeighborhoodAttention1D

__all__ = ["NeighborhoodAttention1D"]
