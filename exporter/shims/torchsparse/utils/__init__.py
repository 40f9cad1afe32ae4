"""Small things."""

from ._dense import to_dense
from .utils import make_divisible, make_ntuple, make_tensor

__all__ = ["make_divisible", "make_ntuple", "make_tensor", "to_dense"]
