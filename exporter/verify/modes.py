"""How a model is run for truth and baseline: over reference implementations."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fuseport.ops import OPS

__all__ = ["References"]


class References(TorchFunctionMode):
    """Calls of fused ops run their reference implementations, in plain differentiable torch."""

    def __init__(self) -> None:
        super().__init__()
        every = (operator for op in OPS.values() for operator in op.operators)
        self._operators = {operator.qualified_name: operator for operator in every}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _NORMS:
            return _in_order(func, *args, **(kwargs or {}))
        operator = self._operators.get(_operator(func))
        if operator is None:
            return func(*args, **(kwargs or {}))
        given = operator.bound(args, kwargs or {})
        result = operator.reference(*given)
        return result if operator.backward is None else _connected(result, given)


_NORMS = torch.batch_norm, functional.batch_norm, torch.instance_norm, functional.instance_norm


def _in_order(func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A norm of which the kernel of the backward is given contiguous tensors alone.

    Of torch 2.11 to 2.15, that on the CPU takes channels last for contiguous, or the other way
    round, where the batch is 1 and the input and its cotangent are not both the same: gradients are
    another pixel's then (`norm(x).flatten(2).transpose(1, 2)`, before a linear layer).
    """
    result: Tensor = func(input.contiguous(), *args, **kwargs)
    if result.requires_grad and functorch.peek_interpreter_stack() is None:
        result.register_hook(Tensor.contiguous)
    return result


def _connected(result: Any, given: Sequence[Any]) -> Any:
    """The results, of which each input that can have one has a gradient, as the operator gives it.

    At some sizes a reference does not use an input, as a decay where there is one step: it is 0.
    """
    first, *more = result if isinstance(result, tuple) else (result,)
    for x in given:
        if isinstance(x, Tensor) and x.requires_grad and first.is_floating_point():
            total = x.real.sum() if x.is_complex() else x.sum()
            nothing = torch.where(torch.zeros_like(total, dtype=torch.bool), total, 0)
            first = first + nothing.to(first.dtype)
    return (first, *more) if isinstance(result, tuple) else first


def _operator(func: Any) -> str:
    if isinstance(func, torch._ops.OpOverloadPacket):
        return func._qualified_op_name
    return func._schema.name if isinstance(func, torch._ops.OpOverload) else ""
