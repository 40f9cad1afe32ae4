"""One decoding step of a module whose code has it: the module itself, called in another way."""

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

__all__ = ["PAST", "PAST_SIZE", "called_by"]

PAST = "past"
"""The dimension of states that have a place for each token before this one: 0 before the first."""
PAST_SIZE = 5
"""Of it in the example that is captured."""


def called_by(module: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """A module with the same parameters under the same names, whose forward is `forward(self, …)`.

    `self` is that module, or a copy that is made of it.
    """
    # Not copy.copy: a parametrized module refuses it.
    other = nn.Module.__new__(type(module))
    other.__dict__.update(module.__dict__)
    other.__dict__["forward"] = MethodType(forward, other)
    return other
