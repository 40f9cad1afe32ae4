"""PointNet++'s layers: set abstraction, of one scale or several, and feature propagation."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from . import pointnet2_utils

__all__ = ["PointnetFPModule", "PointnetSAModule", "PointnetSAModuleMSG", "build_shared_mlp"]


def build_shared_mlp(mlp_spec: Sequence[int], bn: bool = True) -> nn.Sequential:
    """Convolutions of 1 × 1 with these channels, each with its norm, if `bn`, and ReLU."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(mlp_spec):
        layers.append(nn.Conv2d(inputs, outputs, 1, bias=not bn))
        if bn:
            layers.append(nn.BatchNorm2d(outputs))
        layers.append(nn.ReLU())
    return nn.Sequential(*layers)


class PointnetSAModuleMSG(nn.Module):
    """Set abstraction with a group for each of several radii.

    Args:
        npoint: how many centers are chosen; None for one group of all points.
        radii, nsamples: of each group.
        mlps: of each group, the channels of its convolutions; with `use_xyz` the first grows by 3,
            in the list that is given, as in the original.
        bn: whether convolutions have a batch norm, and no bias.
        use_xyz: whether the places are features, too.
    """

    def __init__(
        self,
        npoint: int | None,
        radii: Sequence[float | None],
        nsamples: Sequence[int | None],
        mlps: Sequence[list[int]],
        bn: bool = True,
        use_xyz: bool = True,
    ) -> None:
        super().__init__()
        self.npoint = npoint
        self.groupers = nn.ModuleList()
        self.mlps = nn.ModuleList()
        for radius, nsample, channels in zip(radii, nsamples, mlps, strict=True):
            if npoint is None:
                self.groupers.append(pointnet2_utils.GroupAll(use_xyz))
            else:
                assert radius is not None
                assert nsample is not None
                self.groupers.append(pointnet2_utils.QueryAndGroup(radius, nsample, use_xyz))
            if use_xyz:
                channels[0] += 3
            self.mlps.append(build_shared_mlp(channels, bn))

    def forward(self, xyz: Tensor, features: Tensor | None) -> tuple[Tensor | None, Tensor]:
        """Centers (b, npoint, 3) and features (b, Σ channels, npoint) of (b, n, 3), (b, c, n)."""
        centers = None
        if self.npoint is not None:
            index = pointnet2_utils.furthest_point_sample(xyz, self.npoint)
            centers = pointnet2_utils.gather_operation(xyz.mT, index).mT.contiguous()
        groups = (group(xyz, centers, features) for group in self.groupers)
        pooled = [mlp(group).max(-1).values for mlp, group in zip(self.mlps, groups, strict=True)]
        return centers, torch.cat(pooled, 1)


class PointnetSAModule(PointnetSAModuleMSG):
    """Set abstraction with one radius; arguments are those of `PointnetSAModuleMSG`."""

    def __init__(
        self,
        mlp: list[int],
        npoint: int | None = None,
        radius: float | None = None,
        nsample: int | None = None,
        bn: bool = True,
        use_xyz: bool = True,
    ) -> None:
        super().__init__(npoint, [radius], [nsample], [mlp], bn, use_xyz)


class PointnetFPModule(nn.Module):
    """Features of few points, interpolated at many.

    Args:
        mlp: the channels of its convolutions.
        bn: whether they have a batch norm, and no bias.
    """

    def __init__(self, mlp: Sequence[int], bn: bool = True) -> None:
        super().__init__()
        self.mlp = build_shared_mlp(mlp, bn)

    def forward(
        self,
        unknown: Tensor,
        known: Tensor | None,
        unknow_feats: Tensor | None,
        known_feats: Tensor,
    ) -> Tensor:
        """(b, channels, n) of (b, n, 3), (b, m, 3), (b, c, n) and (b, c', m)."""
        if known is None:
            features = known_feats.expand(*known_feats.shape[:2], unknown.shape[1])
        else:
            distance, index = pointnet2_utils.three_nn(unknown, known)
            near = 1 / (distance + 1e-8)
            weight = near / near.sum(2, keepdim=True)
            features = pointnet2_utils.three_interpolate(known_feats, index, weight)
        if unknow_feats is not None:
            features = torch.cat([features, unknow_feats], 1)
        found: Tensor = self.mlp(features[..., None])[..., 0]
        return found
