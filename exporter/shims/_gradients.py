"""What an extension's backward gives, where its forward is made of functions of torch and ops."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["differentiated", "of_gated"]


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


def of_gated(
    function: Callable[..., Tensor],
    inputs: Sequence[Tensor | None],
    cotangent: Tensor,
    dz: Tensor | None,
    *,
    again: bool,
) -> list[Any]:
    """What the backward of a gated scan gives, as Mamba's extension has it.

    Args:
        function: of `inputs`, in order, of which the last but one is the gate z.
        inputs: tensors, or None.
        cotangent: of the function's result.
        dz: where the gradient of z is written to, if it is.
        again: whether the function's result is wanted, too, where there is a gate.

    Returns:
        The gradients but for that of z; where there is a z that, and the result if wanted.
    """
    *first, found, last = differentiated(function, inputs, cotangent)
    result = [*first, last]
    if inputs[-2] is not None:
        result.append(found if dz is None else dz.copy_(found))
        if again:
            result.append(function(*inputs).detach())
    return result
