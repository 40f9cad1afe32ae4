"""Dense tensors."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

__all__ = ["to_dense"]


def to_dense(feats: Tensor, coords: Tensor, spatial_range: Sequence[Any]) -> Tensor:
    """(batch, x, y, z, c): features (n, c) where their voxels are, (n, 4), and zeros."""
    volume = feats.new_zeros((*spatial_range, feats.shape[1]))
    found: Tensor = volume.index_put([column.long() for column in coords.unbind(1)], feats)
    return found
