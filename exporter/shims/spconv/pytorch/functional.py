"""Sums of sparse tensors. Functions of the extension may be imported, not called."""

from typing import Any

import torch

from fuseport.exporter.shims import _voxels
from fuseport.exporter.shims._placeholder import refusing

from .core import SparseConvTensor

__all__ = ["sparse_add", "sparse_add_hash_based"]


def sparse_add(*tens: SparseConvTensor) -> SparseConvTensor:
    """Of tensors of one shape and any voxels: all of these, in order, and sums of features."""
    first = tens[0]
    for each in tens:
        assert each.spatial_shape == first.spatial_shape
        assert each.batch_size is first.batch_size or each.batch_size == first.batch_size
        assert each.features.shape[1] == first.features.shape[1]
    shape, batch = first.spatial_shape, first.batch_size
    ones = (1,) * len(shape)
    itself = _voxels.Geometry(ones, ones, (0,) * len(shape), ones)
    seeing = [_voxels.reached(each.indices, itself, shape, batch) for each in tens]
    found = _voxels.voxels(_voxels.occupied(torch.cat(seeing)), shape, first.indices.dtype)
    rows = [_voxels.matched(each.indices, found, itself, shape, batch) for each in tens]
    features = [_voxels.taken(each.features, at) for each, at in zip(tens, rows, strict=True)]
    total = sum(features[1:], start=features[0])
    return SparseConvTensor(total, found, shape, batch, benchmark=first.benchmark)


sparse_add_hash_based = sparse_add


def __getattr__(name: str) -> Any:
    return refusing(
        __name__,
        name,
        f"spconv.pytorch.functional.{name} was called, of which fuseport's stand-in has no form: "
        "use spconv's layers",
    )
