"""Stands in for `DCNv4`, deformable convolution and attention of FlashInternImage.

Its own Python code counts factors of a batch's pixels for its launches, so that sizes are fixed: it
gives way to this where its extension `ext` is not there.
"""

from .functions import DCNv4Function, FlashDeformAttnFunction
from .modules import DCNv4, FlashDeformAttn

__all__ = ["DCNv4", "DCNv4Function", "FlashDeformAttn", "FlashDeformAttnFunction"]
