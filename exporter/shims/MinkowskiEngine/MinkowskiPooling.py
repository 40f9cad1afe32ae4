"""Pooling of voxels, in windows or over each batch."""

import itertools
from typing import Any

import torch
from torch import Tensor

from fuseport.exporter.shims import _voxels
from fuseport.exporter.shims.torch_scatter import scatter_max, scatter_sum

from .MinkowskiCommon import MinkowskiModuleBase, PoolingMode
from .MinkowskiCoordinateManager import CoordinateMapKey
from .MinkowskiKernelGenerator import KernelGenerator, generator_of, offsets
from .MinkowskiSparseTensor import SparseTensor, key_of
from .MinkowskiTensorField import TensorField

__all__ = [
    "MinkowskiAvgPooling",
    "MinkowskiGlobalAvgPooling",
    "MinkowskiGlobalMaxPooling",
    "MinkowskiGlobalPooling",
    "MinkowskiGlobalSumPooling",
    "MinkowskiMaxPooling",
    "MinkowskiPoolingBase",
    "MinkowskiPoolingTranspose",
    "MinkowskiSumPooling",
    "over_batches",
]


class MinkowskiPoolingBase(MinkowskiModuleBase):
    """Arguments are as those of `MinkowskiConvolutionBase`.

    A window of the size of its stride has all that is in a cell, whatever its dilation.
    """

    def __init__(
        self,
        kernel_size: Any,
        stride: Any = 1,
        dilation: Any = 1,
        kernel_generator: KernelGenerator | None = None,
        is_transpose: bool = False,
        pooling_mode: PoolingMode = PoolingMode.LOCAL_AVG_POOLING,
        dimension: int | None = -1,
    ) -> None:
        super().__init__()
        self.is_transpose = is_transpose
        self.kernel_generator = generator_of(
            kernel_generator, kernel_size, stride, dilation, dimension
        )
        self.pooling_mode = pooling_mode
        self.dimension = dimension

    @property
    def _is_of_cells(self) -> bool:
        return self.kernel_generator.kernel_size == self.kernel_generator.kernel_stride

    def forward(self, input: SparseTensor, coordinates: Any = None) -> SparseTensor:
        """At the voxels of `coordinates`, if they are given."""
        assert isinstance(input, SparseTensor)
        assert self.dimension == input.D
        key = self._out_key(input, coordinates)
        return SparseTensor(
            self._pooled(input, key),
            coordinate_map_key=key,
            coordinate_manager=input.coordinate_manager,
        )

    def _out_key(self, input: SparseTensor, coordinates: Any) -> CoordinateMapKey:
        if coordinates is not None:
            return key_of(input, coordinates)
        window = self.kernel_generator
        return input.coordinate_manager.stride(input.coordinate_map_key, window.kernel_stride)

    def _pooled(self, input: SparseTensor, key: CoordinateMapKey) -> Tensor:
        manager = input.coordinate_manager
        if not self._is_of_cells:
            rows = manager.rows(input.coordinate_map_key, key, self.kernel_generator)
            return _of_windows(input.F, rows, self.pooling_mode)
        cells = manager.cells(input.coordinate_map_key, key)
        # What is in no cell is in one more.
        return _of_groups(input.F, cells, manager.size(key) + 1, self.pooling_mode)[:-1]


class MinkowskiAvgPooling(MinkowskiPoolingBase):
    """The mean of the voxels that are there."""

    def __init__(
        self,
        kernel_size: Any = -1,
        stride: Any = 1,
        dilation: Any = 1,
        kernel_generator: KernelGenerator | None = None,
        dimension: int | None = None,
    ) -> None:
        mode = PoolingMode.LOCAL_AVG_POOLING
        super().__init__(kernel_size, stride, dilation, kernel_generator, False, mode, dimension)


class MinkowskiSumPooling(MinkowskiPoolingBase):
    """Their sum."""

    def __init__(
        self,
        kernel_size: Any,
        stride: Any = 1,
        dilation: Any = 1,
        kernel_generator: KernelGenerator | None = None,
        dimension: int | None = None,
    ) -> None:
        mode = PoolingMode.LOCAL_SUM_POOLING
        super().__init__(kernel_size, stride, dilation, kernel_generator, False, mode, dimension)


class MinkowskiMaxPooling(MinkowskiPoolingBase):
    """The largest value of each channel; the first that is as large has the gradient.

    Raises:
        NotImplementedError: its windows do not have all of a cell, and so may have no voxel at all.
    """

    def __init__(
        self,
        kernel_size: Any,
        stride: Any = 1,
        dilation: Any = 1,
        kernel_generator: KernelGenerator | None = None,
        dimension: int | None = None,
    ) -> None:
        mode = PoolingMode.LOCAL_MAX_POOLING
        super().__init__(kernel_size, stride, dilation, kernel_generator, False, mode, dimension)
        window = self.kernel_generator
        seen = {tuple(place) for place in offsets(window, [1] * window.dimension)}
        cell = itertools.product(*map(range, window.kernel_stride))
        if not self._is_of_cells and not seen.issuperset(cell):
            raise NotImplementedError(
                "a MinkowskiMaxPooling of a window that does not have all of a cell was made, "
                f"kernel_size {window.kernel_size} with stride {window.kernel_stride} and dilation "
                f"{window.kernel_dilation}: where it has no voxel, MinkowskiEngine gives no value "
                "that means anything; take a larger window"
            )


class MinkowskiPoolingTranspose(MinkowskiPoolingBase):
    """Features of the voxels whose windows have a finer one in them, added up, as the package does.

    Its documentation has a mean, of which its kernels know nothing.
    """

    def __init__(
        self,
        kernel_size: Any,
        stride: Any,
        dilation: Any = 1,
        kernel_generator: KernelGenerator | None = None,
        expand_coordinates: bool = False,
        dimension: int | None = None,
    ) -> None:
        super().__init__(kernel_size, stride, dilation, kernel_generator, True, dimension=dimension)
        if kernel_generator is None:
            self.kernel_generator.expand_coordinates = expand_coordinates

    def _out_key(self, input: SparseTensor, coordinates: Any) -> CoordinateMapKey:
        if coordinates is not None:
            return key_of(input, coordinates)
        manager = input.coordinate_manager
        return manager.stride_region(input.coordinate_map_key, self.kernel_generator, True)

    def _pooled(self, input: SparseTensor, key: CoordinateMapKey) -> Tensor:
        manager, own = input.coordinate_manager, input.coordinate_map_key
        if self._is_of_cells:
            return _voxels.taken(input.F, manager.cells(key, own)[:, None])
        rows = manager.rows(own, key, self.kernel_generator, is_transpose=True)
        return _of_windows(input.F, rows, PoolingMode.LOCAL_SUM_POOLING)


class MinkowskiGlobalPooling(MinkowskiModuleBase):
    """One row for each batch, in their order."""

    def __init__(self, mode: PoolingMode = PoolingMode.GLOBAL_AVG_POOLING_PYTORCH_INDEX) -> None:
        super().__init__()
        assert isinstance(mode, PoolingMode), f"Mode must be an instance of PoolingMode: {mode}"
        self.pooling_mode = mode

    def forward(self, input: Any, coordinates: Any = None) -> SparseTensor:
        """Over all voxels, or points, of each batch.

        Raises:
            NotImplementedError: `coordinates` are given.
        """
        if coordinates is not None:
            raise NotImplementedError(
                "a global pooling of MinkowskiEngine's was called with coordinates, of which "
                "fuseport's stand-in has no form: leave them out"
            )
        manager = input.coordinate_manager
        return SparseTensor(
            over_batches(input, input.F, self.pooling_mode),
            coordinate_map_key=manager.origin(),
            coordinate_manager=manager,
        )

    def extra_repr(self) -> str:
        """Its mode."""
        return f"mode={self.pooling_mode}"


class MinkowskiGlobalSumPooling(MinkowskiGlobalPooling):
    """The sum."""

    def __init__(self, mode: PoolingMode = PoolingMode.GLOBAL_SUM_POOLING_PYTORCH_INDEX) -> None:
        super().__init__(mode)


class MinkowskiGlobalAvgPooling(MinkowskiGlobalPooling):
    """The mean."""


class MinkowskiGlobalMaxPooling(MinkowskiGlobalPooling):
    """The largest value of each channel."""

    def __init__(self, mode: PoolingMode = PoolingMode.GLOBAL_MAX_POOLING_PYTORCH_INDEX) -> None:
        super().__init__(mode)


def over_batches(input: Any, features: Tensor, mode: PoolingMode) -> Tensor:
    """(b, c): of features (n, c) at the voxels, or points, of a tensor."""
    manager = input.coordinate_manager
    rows = manager.batch_rows(input.coordinate_key, isinstance(input, TensorField))
    return _of_groups(features, rows, manager.number_of_unique_batch_indices(), mode)


def _of_windows(features: Tensor, rows: Tensor, mode: PoolingMode) -> Tensor:
    """(m, c) of features (n, c) and the rows of m windows, (m, K)."""
    if mode == PoolingMode.LOCAL_SUM_POOLING:
        return _voxels.gathered(features, rows).sum(1)
    if mode == PoolingMode.LOCAL_AVG_POOLING:
        return _voxels.averaged(features, rows)
    found = _voxels.gathered(features, rows)
    is_there = (rows < features.shape[0])[..., None]
    best = torch.where(is_there, found, -torch.inf).argmax(1, keepdim=True)
    return found.gather(1, best).squeeze(1)


def _of_groups(features: Tensor, groups: Tensor, count: Any, mode: PoolingMode) -> Tensor:
    """(count, c) of features (n, c) and the group of each, (n,)."""
    if "MAX" in mode.name:
        return scatter_max(features, groups, 0, dim_size=count)[0]
    total = scatter_sum(features, groups, 0, dim_size=count)
    if "SUM" in mode.name:
        return total
    many = scatter_sum(torch.ones_like(features[:, :1]), groups, 0, dim_size=count)
    # The mean of nothing is 0 there, but for those of batches by torch's own.
    return total / (many if "PYTORCH" in mode.name else many.clamp(min=1))
