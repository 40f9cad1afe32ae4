"""Features of points in voxels."""

from typing import Any

import torch
from torch import Tensor

from fuseport.exporter.shims.torch_scatter import scatter_sum
from fuseport.exporter.shims.torch_scatter._scatter import sized

from ...tensor import SparseTensor

__all__ = ["spcount", "spcrop", "spvoxelize"]


def spcount(coords: Tensor, num: Any) -> Tensor:
    """(num,), int32: how many of coords, (n,), are each number; those below 0 are not counted."""
    size = sized(num) if isinstance(num, Tensor) else num
    is_one = (coords >= 0).int()
    return scatter_sum(is_one, coords.clamp(min=0).long(), 0, dim_size=size)


def spvoxelize(feats: Tensor, coords: Tensor, counts: Tensor) -> Tensor:
    """(m, c): the sum of features, (n, c), in each voxel, by their rows, (n,), over counts, (m,).

    Points of rows below 0 are left out, and those whose count is 0.
    """
    rows = coords.clamp(min=0).long()
    count = counts[rows]
    is_in = ((coords >= 0) & (count != 0))[:, None]
    share = torch.where(is_in, feats / count.clamp(min=1)[:, None].to(feats.dtype), 0)
    return scatter_sum(share, rows, 0, dim_size=counts.shape[0])


def spcrop(input: SparseTensor, coords_min: Any = None, coords_max: Any = None) -> SparseTensor:
    """The voxels from one corner on, and before another, by the first three columns, as there."""
    coords = input.coords
    keep = torch.ones_like(coords[:, :3], dtype=torch.bool)
    if coords_min is not None:
        keep = keep & (coords[:, :3] >= coords.new_tensor(coords_min))
    if coords_max is not None:
        keep = keep & (coords[:, :3] < coords.new_tensor(coords_max))
    rows = keep.all(1).nonzero().squeeze(1)
    return SparseTensor(input.feats[rows], coords[rows], input.stride)
