"""Operators that TorchScript would differentiate by formulas of its own, which are not autograd's.

From its second call on, TorchScript takes groups of operators that it has formulas for
(torch/csrc/jit/runtime/symbolic_script.cpp) out of autograd's hands. Most say what autograd says.
Others do not: masks are multiplied with, so that an infinite cotangent at `relu(0)` gives NaN, as
does `std` of equal numbers; `hardtanh` has a gradient at its bounds, `max` has none where both are
equal, nor has `clamp` for bounds that are tensors; that of `softplus` is a difference of nearly
equal numbers, 4e-4 off at -10 in float32; what a quotient is divided by is squared, beyond what
float16 holds from 256 on; of a product of two dtypes, both have the wider one; and no complex
number is conjugated.

A group is made of neighbours in one block, and of one operator there is none. So each of these is
put into a block of its own: both branches of an `if` say the same, and its condition is an
attribute, which no optimisation of a module that is trained knows (`torch.jit.freeze` does).
"""

from collections.abc import Iterator

import torch
from torch import Tensor, fx

__all__ = ["APART", "apart", "differs"]

APART = "apart__"

_DIFFERENT = {
    *("clamp", "clip", "div", "divide", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu"),
    *("max", "min", "relu", "relu6", "softplus", "std", "threshold", "true_divide", "where"),
}


def differs(node: fx.Node) -> bool:
    """Whether autograd's gradient of an operator may be another one than TorchScript's."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not isinstance(node.target, torch._ops.OpOverload):
        return False
    values = (value, *(argument.meta.get("val") for argument in node.all_input_nodes))
    kinds = {x.dtype for x in values if isinstance(x, Tensor) and _is_real_or_complex(x)}
    if len(kinds) > 1 or any(kind.is_complex for kind in kinds):
        return True
    name = node.target._schema.name.removeprefix("aten::")
    return name in _DIFFERENT and value.is_floating_point()


def _is_real_or_complex(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def apart(line: str) -> Iterator[str]:
    """The lines of a block that has one statement in it alone."""
    yield f"if self.{APART}:"
    yield f"    {line}"
    yield "else:"
    yield f"    {line}"
