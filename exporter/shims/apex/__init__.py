"""Stands in for the package `apex` of NVIDIA/apex: its norms, and names that models import.

What trains, such as optimizers and `amp.initialize`, can be imported, and says so when called.
"""

from . import amp, normalization, optimizers, parallel

__all__ = ["amp", "normalization", "optimizers", "parallel"]
