"""What an extension's backward gives, where its forward is made of functions of torch and ops."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["differentiated"]


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
