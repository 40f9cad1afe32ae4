"""Tensors side by side, and sums of those that differ."""

from collections.abc import Sequence

import torch

from fuseport.exporter.shims.torch_scatter import scatter_sum

from .tensor import SparseTensor

__all__ = ["cat", "generative_add"]


def cat(inputs: Sequence[SparseTensor]) -> SparseTensor:
    """Features one after another, at the voxels of the first."""
    first = inputs[0]
    output = SparseTensor(torch.cat([each.feats for each in inputs], 1), first.coords, first.stride)
    output._caches = first._caches
    return output


def generative_add(a: SparseTensor, b: SparseTensor) -> SparseTensor:
    """All voxels of both, sorted, and the sums of their features."""
    rows, inverse = torch.unique(torch.cat([a.C, b.C]), dim=0, return_inverse=True)
    features = scatter_sum(torch.cat([a.F, b.F]), inverse, 0, dim_size=rows.shape[0])
    output = SparseTensor(features, rows, a.s, spatial_range=a.spatial_range)
    output._caches = a._caches
    return output
