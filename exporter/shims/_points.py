"""Sampling and neighbours of point clouds, in plain torch.

As the extensions of PointNet++ have them (C. R. Qi et al., "PointNet++: Deep Hierarchical Feature
Learning on Point Sets in a Metric Space", 2017, section 3.2). Points are (b, n, 3), features
(b, c, n), indices int32, as there; of points that are alike the first is taken.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.exporter.shims._stepwise import stepwise

__all__ = [
    "ball_query",
    "furthest_points",
    "gathered",
    "interpolated",
    "nearest",
    "scattered",
    "squared_distances",
]

# A point so near to the origin (its squared norm) is padding, and is not chosen.
_PADDING = 1e-3
_FAR = 1e10
# Past the last of all points.
_NONE = 2**31 - 1


def furthest_points(xyz: Tensor, count: int, padded: bool = True) -> Tensor:
    """(b, count): the first point, and then each time that which is furthest from all chosen.

    If `padded`, what is next to the origin is no point.
    """
    xyz = xyz.detach()
    distance = torch.full_like(xyz[..., 0], _FAR)
    if padded:
        distance = distance.masked_fill(xyz.square().sum(-1) <= _PADDING, -1)
    chosen = torch.zeros_like(distance[:, 0], dtype=torch.int64)

    def one(state: list[Tensor], _: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        distance, chosen = state
        place = xyz.gather(1, chosen[:, None, None].expand(-1, 1, 3))
        distance = torch.minimum(distance, (xyz - place).square().sum(-1))
        return [distance, distance.argmax(1)], [chosen.to(torch.int32)]

    _, (found,) = stepwise(one, [distance, chosen], [torch.arange(count, device=xyz.device)])
    return found.T.contiguous()


def squared_distances(of: Tensor, to: Tensor) -> Tensor:
    """(b, m, n): from each of m points to each of n."""
    return (of[:, :, None] - to[:, None]).square().sum(-1)


def ball_query(centers: Tensor, xyz: Tensor, radius: float, count: int) -> Tensor:
    """(b, m, count): the first points that are within a radius of each of m centers.

    Where there are fewer, the first of them is there again; where there is none, point 0.
    """
    near = squared_distances(centers.detach(), xyz.detach()) < radius**2
    order = torch.arange(xyz.shape[1], dtype=torch.int32, device=xyz.device)
    places = F.pad(torch.where(near, order, _NONE), (0, count), value=_NONE)
    found = places.sort(-1).values[..., :count]
    found = torch.where(found == _NONE, found[..., :1], found)
    return found.masked_fill(found == _NONE, 0)


def nearest(of: Tensor, to: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(b, m, count): squared distances of the nearest points, the nearest first, and indices."""
    distances = squared_distances(of.detach(), to.detach())
    found = distances.topk(count, dim=-1, largest=False)
    return found.values, found.indices.to(torch.int32)


def gathered(features: Tensor, index: Tensor) -> Tensor:
    """(b, c, …) of features (b, c, n) at places (b, …)."""
    flat = index.long().flatten(1)[:, None].expand(-1, features.shape[1], -1)
    found: Tensor = features.gather(2, flat).unflatten(2, index.shape[1:])
    return found


def scattered(grad: Tensor, index: Tensor, size: int) -> Tensor:
    """(b, c, size): the gradient of features by that of `gathered`, (b, c, …)."""
    flat = index.long().flatten(1)[:, None].expand(-1, grad.shape[1], -1)
    return grad.new_zeros(*grad.shape[:2], size).scatter_add(2, flat, grad.flatten(2))


def interpolated(features: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """(b, c, n) of features (b, c, m) at places (b, n, 3), with weights; these have no gradient."""
    return (gathered(features, index) * weight.detach()[:, None]).sum(-1)
