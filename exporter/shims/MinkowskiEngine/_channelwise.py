"""Convolutions of each channel by itself."""

import math
from typing import Any

import torch
from torch import nn

from fuseport.exporter.shims import _voxels

from .MinkowskiCommon import MinkowskiModuleBase, RegionType
from .MinkowskiKernelGenerator import KernelGenerator
from .MinkowskiSparseTensor import SparseTensor

__all__ = ["MinkowskiChannelwiseConvolution"]


class MinkowskiChannelwiseConvolution(MinkowskiModuleBase):
    """Its `kernel` is (places, in); arguments are as those of `MinkowskiConvolution`.

    Raises:
        NotImplementedError: its window is a cross, at which version 0.5 fails.
    """

    def __init__(
        self,
        in_channels: int,
        kernel_size: Any = -1,
        stride: Any = 1,
        dilation: Any = 1,
        bias: bool = False,
        kernel_generator: KernelGenerator | None = None,
        dimension: int = -1,
    ) -> None:
        super().__init__()
        assert dimension > 0, f"Invalid dimension. Please provide a valid one: {dimension}"
        if kernel_generator is None:
            kernel_generator = KernelGenerator(kernel_size, stride, dilation, dimension=dimension)
        if kernel_generator.region_type != RegionType.HYPER_CUBE:
            raise NotImplementedError(
                "MinkowskiChannelwiseConvolution has windows of RegionType.HYPER_CUBE alone"
            )
        self.kernel_generator = kernel_generator
        self.in_channels = in_channels
        self.dimension = dimension
        self.kernel = nn.Parameter(torch.empty(kernel_generator.kernel_volume, in_channels))
        self.bias: nn.Parameter | None = nn.Parameter(torch.empty(1, in_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform, as those of a convolution of all channels."""
        bound = 1 / math.sqrt(self.in_channels * self.kernel_generator.kernel_volume)
        nn.init.uniform_(self.kernel, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, input: SparseTensor, coords: Any = None) -> SparseTensor:
        """At the cells that voxels are in; `coords` is of no effect, as there."""
        assert isinstance(input, SparseTensor)
        assert self.dimension == input.D
        assert self.in_channels == input.shape[1], "Channel size mismatch"
        window, manager = self.kernel_generator, input.coordinate_manager
        key = manager.stride(input.coordinate_map_key, window.kernel_stride)
        rows = manager.rows(input.coordinate_map_key, key, window)
        features = (_voxels.gathered(input.F, rows) * self.kernel).sum(1)
        if self.bias is not None:
            features = features + self.bias.flatten()
        return SparseTensor(features, coordinate_map_key=key, coordinate_manager=manager)
