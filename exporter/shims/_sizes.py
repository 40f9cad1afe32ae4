"""What sizes are known to be."""

from typing import Any

from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

__all__ = ["always"]


def always(condition: Any) -> bool:
    """Whether sizes are so for all inputs; those of `torch.jit.trace`, tensors, cannot say."""
    return not isinstance(condition, Tensor) and statically_known_true(condition)
