"""Where versions before 0.17 have their layer of 2 dimensions."""

from .modules import NeighborhoodAttention2D

__all__ = ["NeighborhoodAttention2D"]
