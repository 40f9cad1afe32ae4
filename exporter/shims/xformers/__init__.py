"""Stands in for the package `xformers`, version 0.0.33: its attention, SwiGLU, norms and indexing.

Attention is computed as matrix products and a softmax, with all scores of a block in memory.
"""

from . import ops

__all__ = ["ops"]
__version__ = "0.0.33"
