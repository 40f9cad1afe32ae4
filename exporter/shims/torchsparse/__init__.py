"""Stands in for the package `torchsparse`, version 2.1: sparse tensors in three dimensions.

Rows of coordinates have the batch first, and none is negative. Those that a strided convolution
makes are sorted, as there, and lie in the volume that the largest coordinates, or `spatial_range`,
leave of a dense one: what is beyond the last whole window is dropped.
"""

from typing import Any

from fuseport.exporter.shims._placeholder import unusable

from . import backend, backends, nn, utils
from .operators import cat, generative_add
from .tensor import PointTensor, SparseTensor

__all__ = [
    "PointTensor",
    "SparseTensor",
    "__version__",
    "backend",
    "backends",
    "cat",
    "generative_add",
    "nn",
    "utils",
]
__version__ = "2.1.0"


def __getattr__(name: str) -> Any:
    return unusable(__name__, name)
