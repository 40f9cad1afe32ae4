"""Voxels of points."""

from typing import Any

import torch
from torch import Tensor

from fuseport.exporter.shims import _lattice

__all__ = ["sparse_quantize", "unique_coordinate_map"]


def sparse_quantize(
    coordinates: Any,
    features: Any = None,
    labels: Any = None,
    ignore_label: int = -100,
    return_index: bool = False,
    return_inverse: bool = False,
    return_maps_only: bool = False,
    quantization_size: Any = None,
    device: Any = "cpu",
) -> Any:
    """The voxels that points (n, d) are in, (m, d), int32, in the order in which they come.

    Args:
        features: (n, c); those of the first point of each voxel come, too.
        labels: None.
        return_index, return_inverse: whether which points these are, (m,), and which voxel each
            point is in, (n,), come, too; or `return_maps_only`, these alone.
        quantization_size: of a voxel, a number or d; None for 1.

    Raises:
        NotImplementedError: labels are given.
    """
    if labels is not None:
        raise NotImplementedError(
            "MinkowskiEngine's sparse_quantize was called with labels, of which fuseport's "
            "stand-in has no form: quantize coordinates, and take labels by their index"
        )
    assert not return_inverse or return_index, "return_inverse must be set with return_index"
    points = torch.as_tensor(coordinates)
    assert points.ndim == 2, "The coordinates must be a 2D matrix."
    if quantization_size is not None:
        points = points / torch.as_tensor(quantization_size, dtype=points.dtype)
    if points.is_floating_point():
        points = points.floor()
    voxels = points.int().to(device)
    unique, inverse = _lattice.distinct(voxels)
    found: list[Any] = [] if return_maps_only else [voxels[unique]]
    if features is not None and not return_maps_only:
        found.append(features[unique])
    if return_index or return_maps_only:
        found.append(unique)
    if return_inverse:
        found.append(inverse)
    return found[0] if len(found) == 1 else tuple(found)


def unique_coordinate_map(coordinates: Tensor, tensor_stride: Any = 1) -> tuple[Tensor, Tensor]:
    """Which of (n, 1 + d) are the first of their kind, (m,), and which of these each is like."""
    return _lattice.distinct(coordinates)
