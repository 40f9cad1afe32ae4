"""What the inputs of a correlation must be, and the shapes and dtypes of its outputs.

All outputs are contiguous. `geometry.hpp` has the same checks in the same order with the same
messages, for hosts that have no Python.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fuseport.ops.checks import dtype_name, require, require_like, require_shape
from fuseport.ops.spec import FLOATING

__all__ = ["Options", "check", "check_cotangent", "fake", "fake_backward"]

_LIMIT = 2**31 - 1


class Options(NamedTuple):
    """What an operator takes after its tensors, in that order."""

    kernel_h: int
    kernel_w: int
    patch_h: int
    patch_w: int
    stride_h: int
    stride_w: int
    padding_h: int
    padding_w: int
    dilation_h: int
    dilation_w: int
    dilation_patch_h: int
    dilation_patch_w: int


def check(op: str, x1: Tensor, x2: Tensor, options: Options) -> tuple[int, ...]:
    """The output's shape; raises ValueError, naming `op` and the argument, unless inputs fit."""
    require(x1.dim() == 4, op, "input1", "(b, c, H, W)", tuple(x1.shape))
    name = dtype_name(x1.dtype)
    require(x1.dtype in FLOATING, op, "input1", "float16, bfloat16, float32 or float64", name)
    require_like(op, "input2", x2, x1.dtype, x1, "input1")
    require_shape(op, "input2", x2, "input1's shape", tuple(x1.shape))
    for name, value in options._asdict().items():
        least = -_LIMIT if name.startswith("padding") else 1
        require(value >= least, op, name, f"{least} or more", value)
        require(value <= _LIMIT, op, name, f"{_LIMIT} or less", value)
    b, _, height, width = x1.shape
    o = options
    rows = _outputs(height, o.kernel_h, o.stride_h, o.padding_h, o.dilation_h)
    columns = _outputs(width, o.kernel_w, o.stride_w, o.padding_w, o.dilation_w)
    fits = rows >= 1 and columns >= 1
    require(fits, op, "input1", "so large that there is an output", (height, width))
    return (b, o.patch_h, o.patch_w, rows, columns)


def check_cotangent(op: str, dout: Tensor, x1: Tensor, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless the cotangent fits inputs that passed `check`."""
    require_like(op, "dout", dout, x1.dtype, x1, "input1")
    require_shape(op, "dout", dout, "(b, ph, pw, oh, ow)", shape)


def _outputs(size: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def fake(x1: Tensor, x2: Tensor, *options: int) -> Tensor:
    """The empty output of `fuseport::correlation`."""
    return x1.new_empty(check("correlation", x1, x2, Options(*options)))


def fake_backward(dout: Tensor, x1: Tensor, x2: Tensor, *options: int) -> tuple[Tensor, Tensor]:
    """Empty outputs of `fuseport::correlation_backward`."""
    op = "correlation_backward"
    check_cotangent(op, dout, x1, check(op, x1, x2, Options(*options)))
    return torch.empty_like(x1, memory_format=torch.contiguous_format), torch.empty_like(
        x2, memory_format=torch.contiguous_format
    )
