"""The fast layer norm."""

from .layer_norm import FastLayerNorm

__all__ = ["FastLayerNorm"]
