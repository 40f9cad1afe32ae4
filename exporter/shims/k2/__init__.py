"""Stands in for `k2` of k2-fsa: the activations that icefall's encoders take of it.

Ragged tensors, automata and losses can be named, as annotations do, and refuse to be called.
"""

import torch
from torch import Tensor

from fuseport.exporter.shims._dtypes import wide
from fuseport.exporter.shims._placeholder import unusable

__all__ = [
    "swoosh_l",
    "swoosh_l_forward",
    "swoosh_l_forward_and_deriv",
    "swoosh_r",
    "swoosh_r_forward",
    "swoosh_r_forward_and_deriv",
]

# Source: k2/python/csrc/torch/v2/autograd/swoosh.cu.
_COEFFICIENT = 0.08
_L = (4.0, 0.035)
_R = (1.0, 0.313261687)

with_cuda = False


def swoosh_l(x: Tensor, dropout_prob: float = 0.0) -> Tensor:
    """log(1 + exp(x - 4)) - 0.08·x - 0.035, in float32, or float64 for such x.

    The gradient is that of the formula; k2 keeps a slope in 8 bits for it, rounded at random.

    Raises:
        NotImplementedError: with dropout, which draws at random.
    """
    return _without_dropout(x, dropout_prob, _L)


def swoosh_r(x: Tensor, dropout_prob: float = 0.0) -> Tensor:
    """log(1 + exp(x - 1)) - 0.08·x - 0.313261687, otherwise as `swoosh_l`."""
    return _without_dropout(x, dropout_prob, _R)


def swoosh_l_forward(x: Tensor) -> Tensor:
    """`swoosh_l`, of which k2's has no gradient."""
    return _swoosh(x, *_L)


def swoosh_r_forward(x: Tensor) -> Tensor:
    """`swoosh_r`, of which k2's has no gradient."""
    return _swoosh(x, *_R)


def swoosh_l_forward_and_deriv(x: Tensor) -> tuple[Tensor, Tensor]:
    """`swoosh_l`, and its slope at each x."""
    return _swoosh(x, *_L), _slope(x, *_L)


def swoosh_r_forward_and_deriv(x: Tensor) -> tuple[Tensor, Tensor]:
    """`swoosh_r`, and its slope at each x."""
    return _swoosh(x, *_R), _slope(x, *_R)


def _without_dropout(x: Tensor, dropout_prob: float, constants: tuple[float, float]) -> Tensor:
    if dropout_prob:
        raise NotImplementedError(
            f"k2's activation was called with dropout_prob={dropout_prob}, which draws at random"
        )
    return _swoosh(x, *constants)


def _swoosh(x: Tensor, shift: float, offset: float) -> Tensor:
    x = x.to(wide(x))
    return torch.logaddexp(x.new_zeros(()), x - shift) - _COEFFICIENT * x - offset


def _slope(x: Tensor, shift: float, offset: float) -> Tensor:
    return torch.sigmoid(x.to(wide(x)) - shift) - _COEFFICIENT


def __getattr__(name: str) -> type:
    return unusable("k2", name)
