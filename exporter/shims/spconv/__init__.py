"""Stands in for the package `spconv`, version 2.3: `spconv.pytorch`, convolutions of voxels.

The voxels that a strided convolution makes are sorted by batch and place; spconv has them in the
order of a hash table, which is no order. Voxels must be unique, as there; of those that are alike
the first is what others see, and `dense` adds them. What makes voxels of points says so when it is
called: give a model its voxels.
"""

from . import constants
from .core import AlgoHint, ConvAlgo

__all__ = ["SPCONV_VERSION_NUMBERS", "AlgoHint", "ConvAlgo", "__version__", "constants"]
__version__ = "2.3.6"
SPCONV_VERSION_NUMBERS = [2, 3, 6]
