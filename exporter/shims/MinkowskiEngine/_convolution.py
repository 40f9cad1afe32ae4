"""Convolutions of voxels, with parameters as MinkowskiEngine's checkpoints have them.

A `kernel` is (places, in, out), or (in, out) of one place without a stride, and a `bias` (1, out).
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from fuseport.exporter.shims import _voxels

from .MinkowskiCommon import ConvolutionMode, MinkowskiModuleBase
from .MinkowskiCoordinateManager import CoordinateMapKey
from .MinkowskiKernelGenerator import KernelGenerator, generator_of
from .MinkowskiSparseTensor import SparseTensor, key_of

__all__ = [
    "MinkowskiConvolution",
    "MinkowskiConvolutionBase",
    "MinkowskiConvolutionTranspose",
    "MinkowskiGenerativeConvolutionTranspose",
]


class MinkowskiConvolutionBase(MinkowskiModuleBase):
    """Of voxels in `dimension` dimensions.

    Args:
        kernel_size, stride, dilation: a number, or one for each dimension.
        kernel_generator: has these in their place.
        is_transpose: it goes back to where voxels came from, or makes some of its own.
        expand_coordinates: it makes voxels wherever its window reaches.
        convolution_mode: of no effect.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any = -1,
        stride: Any = 1,
        dilation: Any = 1,
        bias: bool = False,
        kernel_generator: KernelGenerator | None = None,
        is_transpose: bool = False,
        expand_coordinates: bool = False,
        convolution_mode: ConvolutionMode = ConvolutionMode.DEFAULT,
        dimension: int | None = -1,
    ) -> None:
        super().__init__()
        kernel_generator = generator_of(kernel_generator, kernel_size, stride, dilation, dimension)
        kernel_generator.expand_coordinates = expand_coordinates
        self.is_transpose = is_transpose
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_generator = kernel_generator
        self.dimension = dimension
        self.convolution_mode = convolution_mode
        volume = kernel_generator.kernel_volume
        self.use_mm = volume == 1 and kernel_generator.requires_strided_coordinates
        places = () if self.use_mm else (volume,)
        self.kernel = nn.Parameter(torch.empty(*places, in_channels, out_channels))
        self.bias: nn.Parameter | None = (
            nn.Parameter(torch.empty(1, out_channels)) if bias else None
        )
        self.reset_parameters(is_transpose)

    def reset_parameters(self, is_transpose: bool = False) -> None:
        """Uniform, by how many values an output is of."""
        channels = self.out_channels if is_transpose else self.in_channels
        bound = 1 / math.sqrt(channels * self.kernel_generator.kernel_volume)
        nn.init.uniform_(self.kernel, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def extra_repr(self) -> str:
        """Its arguments."""
        window = self.kernel_generator
        return (
            f"in={self.in_channels}, out={self.out_channels}, kernel_size={window.kernel_size}, "
            f"stride={window.kernel_stride}, dilation={window.kernel_dilation}"
        )

    def forward(self, input: SparseTensor, coordinates: Any = None) -> SparseTensor:
        """At the voxels of `coordinates`, a sparse tensor or a key, if they are given.

        Raises:
            NotImplementedError: they are a tensor of torch's.
        """
        assert isinstance(input, SparseTensor)
        assert self.dimension == input.D
        key, manager = input.coordinate_map_key, input.coordinate_manager
        if self.use_mm:
            features = input.F @ self.kernel
        else:
            key = self._out_key(input, coordinates)
            rows = manager.rows(
                input.coordinate_map_key, key, self.kernel_generator, self.is_transpose
            )
            features = _voxels.gathered(input.F, rows).flatten(1) @ self.kernel.flatten(0, 1)
        if self.bias is not None:
            features = features + self.bias.flatten()
        return SparseTensor(features, coordinate_map_key=key, coordinate_manager=manager)

    def _out_key(self, input: SparseTensor, coordinates: Any) -> CoordinateMapKey:
        window, manager = self.kernel_generator, input.coordinate_manager
        if isinstance(coordinates, Tensor):
            raise NotImplementedError(
                "a convolution of MinkowskiEngine's was called with coordinates that are a tensor "
                "of torch's, to which version 0.5 gives a tensor stride of 0: give it a "
                "SparseTensor of those coordinates, or its coordinate_map_key"
            )
        if coordinates is not None:
            return key_of(input, coordinates)
        if self.is_transpose or window.expand_coordinates:
            return manager.stride_region(input.coordinate_map_key, window, self.is_transpose)
        return manager.stride(input.coordinate_map_key, window.kernel_stride)


class MinkowskiConvolution(MinkowskiConvolutionBase):
    """At the cells that voxels are in: windows begin at a cell, or have their middle there.

    Those of even sizes begin, those of odd sizes have their middle there.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any = -1,
        stride: Any = 1,
        dilation: Any = 1,
        bias: bool = False,
        kernel_generator: KernelGenerator | None = None,
        expand_coordinates: bool = False,
        convolution_mode: ConvolutionMode = ConvolutionMode.DEFAULT,
        dimension: int | None = None,
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            dilation,
            bias,
            kernel_generator,
            is_transpose=False,
            expand_coordinates=expand_coordinates,
            convolution_mode=convolution_mode,
            dimension=dimension,
        )


class MinkowskiConvolutionTranspose(MinkowskiConvolutionBase):
    """At the voxels that there are of the finer stride, or else wherever its window reaches."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any = -1,
        stride: Any = 1,
        dilation: Any = 1,
        bias: bool = False,
        kernel_generator: KernelGenerator | None = None,
        expand_coordinates: bool = False,
        convolution_mode: ConvolutionMode = ConvolutionMode.DEFAULT,
        dimension: int | None = None,
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            dilation,
            bias,
            kernel_generator,
            is_transpose=True,
            expand_coordinates=expand_coordinates,
            convolution_mode=convolution_mode,
            dimension=dimension,
        )


class MinkowskiGenerativeConvolutionTranspose(MinkowskiConvolutionBase):
    """Wherever its window reaches (Gwak et al., "Generative Sparse Detection Networks", 2020)."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any = -1,
        stride: Any = 1,
        dilation: Any = 1,
        bias: bool = False,
        kernel_generator: KernelGenerator | None = None,
        convolution_mode: ConvolutionMode = ConvolutionMode.DEFAULT,
        dimension: int | None = None,
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            dilation,
            bias,
            kernel_generator,
            is_transpose=True,
            expand_coordinates=True,
            convolution_mode=convolution_mode,
            dimension=dimension,
        )
