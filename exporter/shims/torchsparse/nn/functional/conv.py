"""Convolutions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fuseport.exporter.shims import _voxels

from ...tensor import SparseTensor
from ...utils.utils import make_ntuple
from .conv_config import ON_THE_FLY, get_global_conv_config

__all__ = ["conv3d", "refuse_unknown"]


@dataclass(frozen=True)
class Places:
    """What a layer leaves for a transposed one.

    Attributes:
        coords: of voxels after it, (m, 4).
        spatial_range: of their volume, if that of the input was known.
        rows: which of n voxels each place of m windows has in it, (m, K), n where there is none.
        back: which of m voxels each of n is seen by, at each place, (n, K), m where by none.
    """

    coords: Tensor
    spatial_range: tuple[Any, ...] | None
    rows: Tensor
    back: Tensor


def conv3d(
    input: SparseTensor,
    weight: Tensor,
    kernel_size: Any,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    config: Any = None,
    transposed: bool = False,
    generative: bool = False,
    training: bool = False,
) -> SparseTensor:
    """Of a kernel as `Conv3d` has it.

    Without a stride, the voxels stay; with one, there are those of a dense convolution with that
    padding whose window has a voxel. A transposed one gives the voxels that were there before the
    layer of the same size and stride.

    Raises:
        NotImplementedError: see `Conv3d`.
        ValueError: no such layer was before a transposed one.
    """
    refuse_unknown(dilation, generative, config)
    size, step = make_ntuple(kernel_size, ndim=3), make_ntuple(stride, ndim=3)
    if size == step == (1, 1, 1):
        feats = input.feats @ weight
        return input.with_features(feats if bias is None else feats + bias)
    caches = input._caches
    weight = _by_last_axis(weight, size)
    if transposed:
        tensor_stride = tuple(a // b for a, b in zip(input.stride, step, strict=True))
        known = caches.kmaps.get((tensor_stride, size, step))
        if known is None or tensor_stride not in caches.cmaps:
            raise ValueError(
                f"a transposed convolution of torchsparse's, kernel_size {size}, stride {step}, "
                "has no layer of that window before it, whose voxels it would go back to"
            )
        rows, (coords, spatial_range) = known.back, caches.cmaps[tensor_stride]
    else:
        tensor_stride = tuple(a * b for a, b in zip(input.stride, step, strict=True))
        known = caches.kmaps.get((input.stride, size, step))
        if known is None:
            known = _places(input, size, step, make_ntuple(padding, ndim=3))
            caches.kmaps[input.stride, size, step] = known
        rows, coords, spatial_range = known.rows, known.coords, known.spatial_range
    feats = _voxels.gathered(input.feats, rows).flatten(1) @ weight.flatten(0, -2)
    feats = feats if bias is None else feats + bias
    output = SparseTensor(feats, coords, tensor_stride, spatial_range)
    output._caches = caches
    caches.cmaps.setdefault(tensor_stride, (coords, spatial_range))
    return output


def refuse_unknown(dilation: Any, generative: bool, config: Any) -> None:
    """Raises NotImplementedError of what torchsparse 2.1 itself does otherwise than it says."""
    if make_ntuple(dilation, ndim=3) != (1, 1, 1):
        raise NotImplementedError(
            f"a convolution of torchsparse's has dilation {dilation}, which version 2.1 leaves out "
            "of what it computes, and fuseport's stand-in refuses: leave it out"
        )
    if generative:
        raise NotImplementedError(
            "a generative convolution of torchsparse's was asked for, which its default kmap_mode "
            "refuses, and fuseport's stand-in has no form of"
        )
    mode = (config or get_global_conv_config() or {"kmap_mode": ON_THE_FLY}).get("kmap_mode")
    if mode not in (ON_THE_FLY, None):
        raise NotImplementedError(
            f"a convolution of torchsparse's has kmap_mode {mode!r}, of which fuseport's stand-in "
            f"has no form: take {ON_THE_FLY!r}, the default"
        )


def _places(
    input: SparseTensor, size: tuple[int, ...], step: tuple[int, ...], padding: tuple[int, ...]
) -> Places:
    coords, ones = input.coords, (1, 1, 1)
    volume: Sequence[Any] | None = input.spatial_range
    # Where there is no voxel, the volume is of one place.
    every = torch.cat([coords.long(), coords.new_zeros((1, 4), dtype=torch.int64)])
    batch, *shape = (every.amax(0) + 1).unbind() if volume is None else volume
    windows = zip(shape, size, step, padding, strict=True)
    after = [_reach(extent + 2 * pad - k, by) + 1 for extent, k, by, pad in windows]
    spatial_range = None if volume is None else (batch, *after)
    if max(step) > 1:
        geometry = _voxels.Geometry(size, step, padding, ones)
        seeing = _voxels.reached(coords, geometry, after, batch)
        numbers = _voxels.occupied(seeing)
        # What has no number is divided by nothing either, but by 0 it must not be.
        divisors = [torch.as_tensor(extent).clamp(min=1) for extent in after]
        made = _voxels.voxels(numbers, divisors, coords.dtype)
        rows = _voxels.matched(coords, made, geometry, shape, batch)
        return Places(made, spatial_range, rows, _voxels.located(seeing, numbers))
    if volume is not None and after != shape:
        raise NotImplementedError(
            f"a convolution of torchsparse's without a stride, kernel_size {size}, padding "
            f"{padding}, would have a spatial_range of {after} for {shape}, in which version 2.1 "
            "loses voxels, and fuseport's stand-in refuses: leave spatial_range out"
        )
    # Windows of an even number of places begin at the voxel itself.
    is_odd = size[0] * size[1] * size[2] % 2 == 1
    start = tuple((k - 1) // 2 if is_odd else 0 for k in size)
    geometry = _voxels.Geometry(size, ones, start, ones)
    rows = _voxels.matched(coords, coords, geometry, shape, batch)
    back = _voxels.matched(coords, coords, geometry.turned(), shape, batch)
    return Places(coords, spatial_range, rows, back)


def _reach(length: Any, step: int) -> Any:
    return length.div(step, rounding_mode="floor") if isinstance(length, Tensor) else length // step


def _by_last_axis(weight: Tensor, size: tuple[int, ...]) -> Tensor:
    """(K, in, out) of places that change along the last axis first.

    In a kernel of an odd number of places they change along the first axis first.
    """
    if size[0] * size[1] * size[2] % 2 == 0:
        return weight
    places: Tensor = weight.unflatten(0, size[::-1])
    return places.permute(2, 1, 0, 3, 4).flatten(0, 2)
