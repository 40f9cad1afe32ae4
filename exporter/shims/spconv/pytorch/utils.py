"""What belongs to points and not to voxels."""

from typing import Any

import torch
from torch import Tensor

__all__ = ["PointToVoxel", "gather_features_by_pc_voxel_id"]


class PointToVoxel:
    """Makes voxels of points; it may be made, and not called."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As there."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raises NotImplementedError."""
        raise NotImplementedError(
            "spconv's PointToVoxel was called, of which fuseport's stand-in has no form: which "
            "points it keeps is in no order on a GPU; give the model its voxels, made before it"
        )

    generate_voxel_with_id = __call__


def gather_features_by_pc_voxel_id(
    seg_res_features: Tensor, pc_voxel_id: Tensor, invalid_value: float = 0
) -> Tensor:
    """(p, …): the features of each point's voxel, (p,); another value for points in none, -1."""
    shape = (-1,) + (1,) * (seg_res_features.dim() - 1)
    found = seg_res_features.index_select(0, pc_voxel_id.clamp(min=0))
    return torch.where((pc_voxel_id != -1).view(shape), found, invalid_value)
