"""Stands in for the package `transformer_engine` of NVIDIA/TransformerEngine, version 2.20.

Its layers for PyTorch, in the dtypes of their weights: what computes in FP8 or FP4, is divided
among processes or keeps a cache of keys is refused. Parameters have the names and shapes of the
package's, and scales of FP8 in a checkpoint (`_extra_state`) are taken and have no effect.
"""

from . import common, pytorch

__all__ = ["common", "pytorch"]
__version__ = "2.20.0"
