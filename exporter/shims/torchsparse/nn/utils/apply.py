"""Functions of features."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...tensor import SparseTensor

__all__ = ["fapply"]


def fapply(
    input: SparseTensor, fn: Callable[..., Tensor], *args: Any, **kwargs: Any
) -> SparseTensor:
    """A function's value of features, at the same voxels."""
    return input.with_features(fn(input.feats, *args, **kwargs))
