"""Windows: which places they have, in the order of kernels in MinkowskiEngine's checkpoints."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from .MinkowskiCommon import RegionType, convert_to_int_list

__all__ = ["KernelGenerator", "get_kernel_volume", "offsets"]


class KernelGenerator:
    """The geometry of a layer.

    Args:
        kernel_size, stride, dilation: a number, or one for each dimension.
        region_type: a hypercube, or a cross along the axes.
        expand_coordinates: whether the layer makes voxels wherever its window reaches.
        region_offsets, axis_types: of windows of another shape, which MinkowskiEngine 0.5 has no
            kernel for; None.

    Raises:
        NotImplementedError: of a window of another shape.
    """

    def __init__(
        self,
        kernel_size: Any = -1,
        stride: Any = 1,
        dilation: Any = 1,
        is_transpose: bool = False,
        region_type: RegionType = RegionType.HYPER_CUBE,
        region_offsets: Any = None,
        expand_coordinates: bool = False,
        axis_types: Any = None,
        dimension: int = -1,
    ) -> None:
        assert dimension > 0
        assert isinstance(region_type, RegionType)
        self.kernel_size = convert_to_int_list(kernel_size, dimension)
        self.kernel_stride = convert_to_int_list(stride, dimension)
        self.kernel_dilation = convert_to_int_list(dilation, dimension)
        self.region_type = region_type
        self.region_offsets = torch.empty(0, dtype=torch.int32)
        self.axis_types = axis_types
        self.dimension = dimension
        self.kernel_volume = get_kernel_volume(
            region_type, self.kernel_size, region_offsets, axis_types, dimension
        )
        # As there: in one dimension this is the stride itself, which counts as true.
        is_one = all(step == 1 for step in self.kernel_stride)
        self.requires_strided_coordinates = is_one or dimension == 1
        self.expand_coordinates = expand_coordinates

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(kernel_size={self.kernel_size}, "
            f"kernel_stride={self.kernel_stride}, kernel_dilation={self.kernel_dilation}, "
            f"region_type={self.region_type}, expand_coordinates={self.expand_coordinates}, "
            f"dimension={self.dimension})"
        )


def generator_of(
    given: KernelGenerator | None, kernel_size: Any, stride: Any, dilation: Any, dimension: Any
) -> KernelGenerator:
    """The window of a layer: what it is given, or a hypercube."""
    assert dimension is not None, "a layer of MinkowskiEngine's wants its dimension"
    assert dimension > 0, f"Invalid dimension. Please provide a valid one: {dimension}"
    if given is not None:
        return given
    return KernelGenerator(kernel_size, stride, dilation, dimension=dimension)


def get_kernel_volume(
    region_type: RegionType,
    kernel_size: Sequence[int],
    region_offset: Any,
    axis_types: Any,
    dimension: int,
) -> int:
    """How many places a window has."""
    if region_type == RegionType.CUSTOM or axis_types is not None or region_offset is not None:
        raise NotImplementedError(
            "a window of MinkowskiEngine's RegionType.CUSTOM, or of axis_types, was asked for: "
            "version 0.5 has no kernel for it, nor has fuseport's stand-in; take HYPER_CUBE or "
            "HYPER_CROSS"
        )
    assert min(kernel_size) > 0, "kernel_size must be positive"
    if region_type == RegionType.HYPER_CUBE:
        return math.prod(kernel_size)
    assert all(size % 2 for size in kernel_size), "kernel_size must be odd for HYPER_CROSS"
    return sum(size - 1 for size in kernel_size) + 1


def offsets(window: KernelGenerator, tensor_stride: Sequence[int]) -> list[list[int]]:
    """How far each place of a window is from where the window is, in the order of its kernel.

    That of a hypercube's places changes along the first axis first. Odd sizes are centred, and even
    ones begin at the window's own place. A cross has its middle first, then each axis: what is
    ahead, from near to far, and what is behind, from far to near (`coordinate_at` in
    MinkowskiEngine's src/kernel_region.hpp).
    """
    size = window.kernel_size
    spread = zip(window.kernel_dilation, tensor_stride, strict=True)
    steps = [dilation * step for dilation, step in spread]
    if window.region_type == RegionType.HYPER_CROSS:
        places = [[0] * len(size)]
        for axis, extent in enumerate(size):
            half = extent // 2
            for place in (*range(1, half + 1), *range(-half, 0)):
                places.append([place if dim == axis else 0 for dim in range(len(size))])
    else:
        starts = [-(extent // 2) if extent % 2 else 0 for extent in size]
        ranges = [range(start, start + extent) for start, extent in zip(starts, size, strict=True)]
        places = [list(place[::-1]) for place in itertools.product(*ranges[::-1])]
    return [[x * step for x, step in zip(place, steps, strict=True)] for place in places]
