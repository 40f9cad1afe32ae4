"""`grid_sample` of volumes by operators that every format has, and that have derivatives."""

import itertools
from typing import Any

import torch
from torch import Tensor

__all__ = ["grid_sampler_3d"]

_NEAREST, _BORDER, _REFLECTION = 1, 1, 2  # torch's numbers for modes, and for paddings


def grid_sampler_3d(
    x: Tensor,
    grid: Tensor,
    interpolation_mode: int = 0,
    padding_mode: int = 0,
    align_corners: bool = False,
) -> Tensor:
    """As `aten.grid_sampler_3d`: (b, c, d, h, w) at (b, d', h', w', 3) to (b, c, d', h', w')."""
    dtype = x.dtype
    if dtype in (torch.float16, torch.bfloat16):
        x, grid = x.float(), grid.float()
    sizes = x.shape[2:]
    places = [
        _place(grid[..., 2 - i], size, padding_mode, align_corners) for i, size in enumerate(sizes)
    ]
    volume = x.flatten(2)

    def at(voxels: list[Tensor]) -> Tensor:
        index: Any = 0
        outside = torch.zeros_like(voxels[0], dtype=torch.bool)
        for voxel, size in zip(voxels, sizes, strict=True):
            outside = outside | (voxel < 0) | (voxel >= size)
            index = index * size + _clamped(voxel, size).long()
        places = index.flatten(1).unsqueeze(1).expand(-1, x.shape[1], -1)
        found = volume.gather(2, places).reshape(*x.shape[:2], *grid.shape[1:4])
        return found.masked_fill(outside.unsqueeze(1), 0)

    if interpolation_mode == _NEAREST:
        return at([place.round() for place in places]).to(dtype)
    before = [place.floor() for place in places]
    behind = [place - start for place, start in zip(places, before, strict=True)]
    out = torch.zeros((), dtype=x.dtype, device=x.device)
    for corner in itertools.product((0, 1), repeat=3):
        weight: Any = 1
        for side, part in zip(corner, behind, strict=True):
            weight = weight * (part if side else 1 - part)
        voxels = [start + side for start, side in zip(before, corner, strict=True)]
        out = out + at(voxels) * weight.unsqueeze(1)
    return out.to(dtype)


def _place(x: Tensor, size: Any, padding_mode: int, align_corners: bool) -> Tensor:
    """Of coordinates from -1 to 1, in voxels, within the volume if padding says so."""
    place = (x + 1) / 2 * (size - 1) if align_corners else ((x + 1) * size - 1) / 2
    if padding_mode == _REFLECTION:
        # Between the centres of the outer voxels, or their outer faces. Of a single voxel there is
        # no room between centres; any will do, for all of it is clamped.
        least = 0.0 if align_corners else -0.5
        span = torch.sym_max(size - 1, 1) if align_corners else size
        distance = (place - least).abs()
        extra = distance.fmod(span)
        flipped = (distance / span).floor().fmod(2) != 0
        place = torch.where(flipped, span - extra, extra) + least
    return place if padding_mode not in (_BORDER, _REFLECTION) else _clamped(place, size)


def _clamped(place: Tensor, size: Any) -> Tensor:
    # By tensors: of a bound that is a size, ONNX's exporter has no form.
    bounds = (torch.scalar_tensor(n, dtype=place.dtype, device=place.device) for n in (0, size - 1))
    return torch.clamp(place, *bounds)
