"""Stands in for the package `causal_conv1d` of Dao-AILab/causal-conv1d, version 1.7."""

from .causal_conv1d_interface import causal_conv1d_fn, causal_conv1d_update

__all__ = ["causal_conv1d_fn", "causal_conv1d_update"]
__version__ = "1.7.0"
