"""What all of it has in common; enumerations that the package has of its extension."""

from collections.abc import Iterable
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = [
    "BroadcastMode",
    "ConvolutionMode",
    "CoordinateMapType",
    "GPUMemoryAllocatorType",
    "MinkowskiAlgorithm",
    "MinkowskiModuleBase",
    "PoolingMode",
    "RegionType",
    "convert_to_int_list",
    "convert_to_int_tensor",
]


class RegionType(Enum):
    """The shape of a window."""

    HYPER_CUBE = 0
    HYPER_CROSS = 1
    CUSTOM = 2


class PoolingMode(Enum):
    """What is pooled, and by which kernel there."""

    LOCAL_SUM_POOLING = 0
    LOCAL_AVG_POOLING = 1
    LOCAL_MAX_POOLING = 2
    GLOBAL_SUM_POOLING_DEFAULT = 3
    GLOBAL_AVG_POOLING_DEFAULT = 4
    GLOBAL_MAX_POOLING_DEFAULT = 5
    GLOBAL_SUM_POOLING_KERNEL = 6
    GLOBAL_AVG_POOLING_KERNEL = 7
    GLOBAL_MAX_POOLING_KERNEL = 8
    GLOBAL_SUM_POOLING_PYTORCH_INDEX = 9
    GLOBAL_AVG_POOLING_PYTORCH_INDEX = 10
    GLOBAL_MAX_POOLING_PYTORCH_INDEX = 11


class BroadcastMode(Enum):
    """What a batch's features do to those of its voxels."""

    ELEMENTWISE_ADDITON = 0  # as MinkowskiEngine spells it
    ELEMENTWISE_MULTIPLICATION = 1


class ConvolutionMode(Enum):
    """Which kernel there; of no effect."""

    DEFAULT = 0
    DIRECT_GEMM = 1
    COPY_GEMM = 2


class MinkowskiAlgorithm(Enum):
    """How much memory it takes there; of no effect."""

    DEFAULT = 0
    MEMORY_EFFICIENT = 1
    SPEED_OPTIMIZED = 2


class CoordinateMapType(Enum):
    """Where coordinates are there; of no effect."""

    CPU = 0
    CUDA = 1


class GPUMemoryAllocatorType(Enum):
    """Whose memory it is there; of no effect."""

    PYTORCH = 0
    CUDA = 1


class MinkowskiModuleBase(nn.Module):
    """What layers are."""


def convert_to_int_list(arg: Any, dimension: int) -> list[int]:
    """A number, or as many as there are dimensions, as a list."""
    if isinstance(arg, Iterable):
        found = [int(value) for value in arg]
        assert len(found) == dimension, f"{len(found)} numbers for {dimension} dimensions"
        return found
    if not isinstance(arg, (int, float, np.number)):
        raise ValueError("Input must be a scalar or a sequence")
    return [int(arg)] * dimension


def convert_to_int_tensor(arg: Any, dimension: int) -> Tensor:
    """The same as a tensor, int32."""
    return torch.tensor(convert_to_int_list(arg, dimension), dtype=torch.int32)
