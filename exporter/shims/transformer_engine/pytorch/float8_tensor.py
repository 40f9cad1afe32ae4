"""Tensors of FP8, of which there are none: for code that asks whether one is."""

from ._refused import Refused

__all__ = ["Float8Tensor"]


class Float8Tensor(Refused):
    """Refuses to be made."""

    _why = "holds FP8"
    _instead = "dequantise it, and save the checkpoint again"
