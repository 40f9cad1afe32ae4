"""Pooling of voxels."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fuseport.exporter.shims import _voxels

from ..core import ConvAlgo
from . import ops
from ._places import moved, strided, within
from .core import SparseConvTensor, expand_nd
from .modules import SparseModule

__all__ = [
    "SparseAvgPool",
    "SparseAvgPool1d",
    "SparseAvgPool2d",
    "SparseAvgPool3d",
    "SparseGlobalAvgPool",
    "SparseGlobalMaxOrAvgPool",
    "SparseGlobalMaxPool",
    "SparseMaxPool",
    "SparseMaxPool1d",
    "SparseMaxPool2d",
    "SparseMaxPool3d",
    "SparseMaxPool4d",
]


class _Pool(SparseModule):
    """Arguments are as those of `SparseConvolution`; a stride of None is the window's size.

    Attributes:
        pooled: (m, c) of features (n, c) and the rows of m windows.
    """

    pooled: Callable[[Tensor, Tensor], Tensor]

    def __init__(
        self,
        ndim: int,
        kernel_size: Any = 3,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        indice_key: str | None = None,
        subm: bool = False,
        algo: ConvAlgo | None = None,
        record_voxel_count: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        self.ndim = ndim
        self.kernel_size = expand_nd(ndim, kernel_size)
        self.stride = list(self.kernel_size) if stride is None else expand_nd(ndim, stride)
        self.padding = expand_nd(ndim, padding)
        self.dilation = expand_nd(ndim, dilation)
        self.subm = subm
        self.indice_key = indice_key
        if record_voxel_count and not subm:
            count = torch.zeros(1, dtype=torch.int32)
            self.register_buffer("max_num_voxels_during_training", count)
        few = math.prod(self.kernel_size) <= 128
        own = ConvAlgo.MaskImplicitGemm if few else ConvAlgo.Native
        self.algo = own if algo is None else algo

    def forward(self, input: SparseConvTensor) -> SparseConvTensor:
        """At the voxels of a convolution with the same window."""
        window = (self.kernel_size, self.stride, self.padding, self.dilation)
        if self.subm:
            data = within(input, self.kernel_size, self.dilation, self.algo)
        else:
            shape = ops.get_conv_output_size(input.spatial_shape, *window)
            data = strided(input, _voxels.Geometry(*window), shape, self.algo)
        kept = dict(input.indice_dict)
        if self.indice_key is not None:
            if self.indice_key in kept:
                raise ValueError(f"indice key {self.indice_key} exists")
            kept[self.indice_key] = data
        return moved(input, self.pooled(input.features, data.rows), data, kept)


class SparseMaxPool(_Pool):
    """The largest value, and 0 where none is larger."""

    pooled = staticmethod(_voxels.largest)


class SparseAvgPool(_Pool):
    """The mean of the voxels that are there."""

    pooled = staticmethod(_voxels.averaged)


class _Arguments(_Pool):
    DIMENSIONS: int

    def __init__(
        self,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        indice_key: str | None = None,
        algo: ConvAlgo | None = None,
        record_voxel_count: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(
            self.DIMENSIONS,
            kernel_size,
            stride,
            padding,
            dilation,
            indice_key,
            algo=algo,
            record_voxel_count=record_voxel_count,
            name=name,
        )


class SparseMaxPool1d(_Arguments, SparseMaxPool):
    """In one dimension."""

    DIMENSIONS = 1


class SparseMaxPool2d(_Arguments, SparseMaxPool):
    """In two."""

    DIMENSIONS = 2


class SparseMaxPool3d(_Arguments, SparseMaxPool):
    """In three."""

    DIMENSIONS = 3


class SparseMaxPool4d(_Arguments, SparseMaxPool):
    """In four."""

    DIMENSIONS = 4


class SparseAvgPool1d(_Arguments, SparseAvgPool):
    """In one dimension."""

    DIMENSIONS = 1


class SparseAvgPool2d(_Arguments, SparseAvgPool):
    """In two."""

    DIMENSIONS = 2


class SparseAvgPool3d(_Arguments, SparseAvgPool):
    """In three."""

    DIMENSIONS = 3


class SparseGlobalMaxOrAvgPool(SparseModule):
    """Over all voxels of each volume."""

    def __init__(self, is_mean: bool, name: str | None = None) -> None:
        super().__init__(name)
        self.is_mean = is_mean

    def forward(self, input: SparseConvTensor) -> Tensor:
        """(batch, c); of means, those of the first channel alone, (batch,), as there."""
        features, found = input.features, []
        for i in range(input.batch_size):
            is_in = (input.indices[:, 0] == i)[:, None]
            if self.is_mean:
                total = torch.where(is_in, features, 0).sum(0)
                found.append((total / is_in.sum())[0])
            else:
                found.append(torch.where(is_in, features, -torch.inf).amax(0))
        return torch.stack(found)


class SparseGlobalAvgPool(SparseGlobalMaxOrAvgPool):
    """The mean."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(True, name)


class SparseGlobalMaxPool(SparseGlobalMaxOrAvgPool):
    """The largest value."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(False, name)
