"""Attention over channels. Version 0.5's residual blocks with it cannot be made there either."""

from typing import Any

from torch import nn

from fuseport.exporter.shims._placeholder import unusable

from .._broadcast import MinkowskiBroadcastMultiplication
from ..MinkowskiNonlinearity import MinkowskiReLU, MinkowskiSigmoid
from ..MinkowskiOps import MinkowskiLinear
from ..MinkowskiPooling import MinkowskiGlobalPooling

__all__ = ["SELayer"]


class SELayer(nn.Module):
    """Each batch's channels, times what its means say."""

    def __init__(self, channel: int, reduction: int = 16, D: int = -1) -> None:
        super().__init__()
        self.fc = nn.Sequential(
            MinkowskiLinear(channel, channel // reduction),
            MinkowskiReLU(inplace=True),
            MinkowskiLinear(channel // reduction, channel),
            MinkowskiSigmoid(),
        )
        self.pooling = MinkowskiGlobalPooling()
        self.broadcast_mul = MinkowskiBroadcastMultiplication()

    def forward(self, x: Any) -> Any:
        """Of a sparse tensor."""
        return self.broadcast_mul(x, self.fc(self.pooling(x)))


def __getattr__(name: str) -> Any:
    return unusable(__name__, name)
