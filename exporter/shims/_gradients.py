"""Gradients of stand-ins: what an extension's backward gives, by the functions that its forward is
made of."""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

__all__ = ["INLINED", "differentiated"]

INLINED: ContextVar[bool] = ContextVar("inlined", default=False)
"""Whether autograd differentiates the forward of autograd functions now, and calls no backward of
theirs: then what a stand-in does in a backward pass is a forward that a checkpoint repeats."""


def differentiated(
    function: Callable[..., Tensor], inputs: Sequence[Tensor | None], cotangent: Tensor
) -> list[Any]:
    """Gradients of `function`, by torch's autograd through the op; None where an input is None.

    Args:
        function: of `inputs`, in order.
        inputs: tensors, or None.
        cotangent: of the function's result.
    """
    with torch.enable_grad():
        leaves = [None if t is None else t.detach().requires_grad_() for t in inputs]
        out = function(*leaves)
        given = [leaf for leaf in leaves if leaf is not None]
        gradients = iter(torch.autograd.grad(out, given, cotangent.to(out.dtype)))
    return [None if leaf is None else next(gradients) for leaf in leaves]
