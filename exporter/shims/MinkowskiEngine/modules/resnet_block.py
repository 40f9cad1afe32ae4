"""Residual blocks."""

from typing import Any

from torch import nn

from .._convolution import MinkowskiConvolution
from ..MinkowskiNonlinearity import MinkowskiReLU
from ..MinkowskiNormalization import MinkowskiBatchNorm

__all__ = ["BasicBlock", "Bottleneck"]


class BasicBlock(nn.Module):
    """Two convolutions of 3."""

    expansion = 1

    def __init__(
        self,
        inplanes: int,
        planes: int,
        stride: Any = 1,
        dilation: Any = 1,
        downsample: nn.Module | None = None,
        bn_momentum: float = 0.1,
        dimension: int = -1,
    ) -> None:
        super().__init__()
        assert dimension > 0
        self.conv1 = MinkowskiConvolution(
            inplanes, planes, 3, stride, dilation, dimension=dimension
        )
        self.norm1 = MinkowskiBatchNorm(planes, momentum=bn_momentum)
        self.conv2 = MinkowskiConvolution(planes, planes, 3, 1, dilation, dimension=dimension)
        self.norm2 = MinkowskiBatchNorm(planes, momentum=bn_momentum)
        self.relu = MinkowskiReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: Any) -> Any:
        """Of a sparse tensor."""
        out = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class Bottleneck(nn.Module):
    """A convolution of 3 between two of 1."""

    expansion = 4

    def __init__(
        self,
        inplanes: int,
        planes: int,
        stride: Any = 1,
        dilation: Any = 1,
        downsample: nn.Module | None = None,
        bn_momentum: float = 0.1,
        dimension: int = -1,
    ) -> None:
        super().__init__()
        assert dimension > 0
        wide = planes * self.expansion
        self.conv1 = MinkowskiConvolution(inplanes, planes, 1, dimension=dimension)
        self.norm1 = MinkowskiBatchNorm(planes, momentum=bn_momentum)
        self.conv2 = MinkowskiConvolution(planes, planes, 3, stride, dilation, dimension=dimension)
        self.norm2 = MinkowskiBatchNorm(planes, momentum=bn_momentum)
        self.conv3 = MinkowskiConvolution(planes, wide, 1, dimension=dimension)
        self.norm3 = MinkowskiBatchNorm(wide, momentum=bn_momentum)
        self.relu = MinkowskiReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: Any) -> Any:
        """Of a sparse tensor."""
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.relu(self.norm2(self.conv2(out)))
        out = self.norm3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)
