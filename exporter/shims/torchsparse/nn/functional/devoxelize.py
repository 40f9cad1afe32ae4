"""Features of voxels at points between them."""

import itertools

import torch
from torch import Tensor

from fuseport.exporter.shims import _voxels

__all__ = ["calc_ti_weights", "spdevoxelize"]


def calc_ti_weights(coords: Tensor, idx_query: Tensor, scale: float = 1) -> Tensor:
    """(n, 8): of trilinear interpolation at points, (n, 3), without a gradient.

    Args:
        idx_query: the voxels around each point, (n, 8), the last axis first; -1 where there is
            none, whose weight is 0. The others are made to add up to 1.
        scale: how far voxels are apart.
    """
    points = coords.detach()
    share = points / scale - torch.floor(points / scale)
    corners = list(itertools.product((0, 1), repeat=3))
    sides = [[(1 - share[:, i], share[:, i])[corner[i]] for i in range(3)] for corner in corners]
    weights = torch.stack([a * b * c for a, b, c in sides], 1)
    weights = torch.where(idx_query == -1, 0, weights)
    return weights / (weights.sum(1, keepdim=True) + 1e-8)


def spdevoxelize(feats: Tensor, coords: Tensor, weights: Tensor) -> Tensor:
    """(n, c): sums of the features of voxels, (m, c), by their rows, (n, 8), times weights."""
    rows = torch.where(coords >= 0, coords.long(), feats.shape[0])
    found: Tensor = (_voxels.gathered(feats, rows) * weights.detach()[..., None]).sum(1)
    return found.to(feats.dtype)
