"""Which voxels a layer makes, and which it sees in its windows."""

from typing import Any

from torch import Tensor

from fuseport.exporter.shims import _voxels

from ..core import ConvAlgo
from .core import IndiceData, SparseConvTensor

__all__ = ["moved", "returned", "strided", "within"]


def strided(
    input: SparseConvTensor, geometry: _voxels.Geometry, shape: list[Any], algo: ConvAlgo
) -> IndiceData:
    """Places of a layer that makes voxels of its own, in a volume of `shape`.

    Raises:
        ValueError: that volume has none.
    """
    if any(isinstance(size, int) and size <= 0 for size in shape):
        raise ValueError(
            f"your out spatial shape {shape} reach zero!!! input shape: {input.spatial_shape}"
        )
    seeing = _voxels.reached(input.indices, geometry, shape, input.batch_size)
    numbers = _voxels.occupied(seeing)
    made = _voxels.voxels(numbers, shape, input.indices.dtype)
    rows = _voxels.matched(input.indices, made, geometry, input.spatial_shape, input.batch_size)
    return IndiceData(
        made,
        input.indices,
        input.spatial_shape,
        shape,
        is_subm=False,
        algo=algo,
        rows=rows,
        geometry=geometry,
        seen=(seeing, numbers),
    )


def within(
    input: SparseConvTensor, size: list[int], dilation: list[int], algo: ConvAlgo
) -> IndiceData:
    """Places of a layer that keeps its voxels."""
    ones = [1] * len(size)
    padding = [(k // 2) * spread for k, spread in zip(size, dilation, strict=True)]
    geometry = _voxels.Geometry(size, ones, padding, dilation)
    voxels, shape = input.indices, input.spatial_shape
    rows = _voxels.matched(voxels, voxels, geometry, shape, input.batch_size)
    return IndiceData(
        voxels,
        voxels,
        shape,
        shape,
        is_subm=True,
        algo=algo,
        rows=_voxels.within(rows),
        geometry=geometry,
    )


def returned(data: IndiceData) -> IndiceData:
    """Places of a layer that goes back to where another came from."""
    assert data.seen is not None
    return IndiceData(
        data.indices,
        data.out_indices,
        data.out_spatial_shape,
        data.spatial_shape,
        is_subm=False,
        algo=data.algo,
        rows=_voxels.located(*data.seen),
        geometry=data.geometry.turned(),
    )


def moved(
    input: SparseConvTensor, features: Tensor, data: IndiceData, kept: dict[Any, IndiceData]
) -> SparseConvTensor:
    """Features at the voxels that a layer makes."""
    out = input.replace_feature(features)
    out.indices = data.out_indices
    out.indice_dict = kept
    out.spatial_shape = data.out_spatial_shape
    return out
