"""What networks are derived from."""

from abc import ABC, abstractmethod
from typing import Any

from torch import nn

__all__ = ["MinkowskiNetwork"]


class MinkowskiNetwork(nn.Module, ABC):
    """Of voxels in D dimensions."""

    def __init__(self, D: int) -> None:
        super().__init__()
        self.D = D

    @abstractmethod
    def forward(self, x: Any) -> Any:
        """What it computes."""
