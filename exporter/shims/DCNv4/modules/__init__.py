"""Both as layers, with parameters as checkpoints have them."""

from .dcnv4 import DCNv4
from .flash_deform_attn import FlashDeformAttn

__all__ = ["DCNv4", "FlashDeformAttn"]
