"""Sizes as tuples."""

from collections.abc import Sequence
from math import prod

from .._arguments import check_all_args

__all__ = ["check_all_args", "get_num_na_weights"]


def get_num_na_weights(kernel_size: Sequence[int]) -> int:
    """How many keys a window has."""
    return prod(kernel_size)
