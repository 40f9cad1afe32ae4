"""Tensors that stand for numbers of model code, as `x.sum().item()`.

Where what is computed of such numbers is to be seen, they are tensors of no dimension. What takes
tensors for something else than numbers, as a Triton kernel does, has to tell them apart.
"""

from torch import Tensor

__all__ = ["as_number", "is_number"]

_MARK = "fuseport_number"


def as_number(x: Tensor) -> Tensor:
    """The number that a tensor of one element has."""
    number = x.detach().reshape(())
    setattr(number, _MARK, True)
    return number


def is_number(x: Tensor) -> bool:
    """Whether a tensor is what code has for a number."""
    return getattr(x, _MARK, False) is True
