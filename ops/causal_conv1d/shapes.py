"""What the inputs of a causal convolution must be, and the shapes, dtypes, strides of its outputs.

`checks.hpp` has the same checks in the same order with the same messages, for hosts that have no
Python; a test holds the two against each other.
"""

import torch
from torch import Tensor

from fuseport.ops.checks import dtype_name, require, require_like, require_shape
from fuseport.ops.layout import empty_as
from fuseport.ops.spec import FLOATING

__all__ = [
    "check",
    "check_cotangents",
    "fake_conv",
    "fake_conv_backward",
    "fake_packed",
    "fake_packed_backward",
]


def check(
    op: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    initial_states: Tensor | None,
    seq_idx: Tensor | None,
) -> None:
    """Raises ValueError, naming `op` and the argument, unless the inputs fit each other."""
    require(x.dim() == 3, op, "x", "(b, d, l)", tuple(x.shape))
    name = dtype_name(x.dtype)
    require(x.dtype in FLOATING, op, "x", "float16, bfloat16, float32 or float64", name)
    b, d, l = x.shape  # noqa: E741
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    require_like(op, "weight", weight, wide if weight.dtype == wide else x.dtype, x, "x")
    require(weight.dim() == 2, op, "weight", "(d, W)", tuple(weight.shape))
    width = weight.shape[1]
    require(width >= 1, op, "weight", "of width 1 or more", width)
    require_shape(op, "weight", weight, "(d, W)", (d, width))
    require_like(op, "bias", bias, weight.dtype, x, "x")
    require_shape(op, "bias", bias, "(d,)", (d,))
    if initial_states is not None:
        require_like(op, "initial_states", initial_states, x.dtype, x, "x")
        require_shape(op, "initial_states", initial_states, "(b, d, W-1)", (b, d, width - 1))
    if seq_idx is not None:
        require_like(op, "seq_idx", seq_idx, torch.int32, x, "x")
        require_shape(op, "seq_idx", seq_idx, "(b, l)", (b, l))


def check_cotangents(
    op: str, dout: Tensor, dfinal_states: Tensor, x: Tensor, weight: Tensor
) -> None:
    """Raises ValueError unless cotangents fit inputs that passed `check`."""
    b, d, l = x.shape  # noqa: E741
    require_like(op, "dout", dout, x.dtype, x, "x")
    require_shape(op, "dout", dout, "x's shape", (b, d, l))
    require_like(op, "dfinal_states", dfinal_states, x.dtype, x, "x")
    states = (b, d, weight.shape[1] - 1)
    require_shape(op, "dfinal_states", dfinal_states, "(b, d, W-1)", states)


def _states(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1], weight.shape[1] - 1))


def _flat(t: Tensor) -> Tensor:
    return torch.empty(t.shape, dtype=t.dtype, device=t.device)


def fake_conv(
    x: Tensor, weight: Tensor, bias: Tensor, initial_states: Tensor, silu: bool
) -> tuple[Tensor, Tensor]:
    """Empty outputs of `fuseport::causal_conv1d`."""
    check("causal_conv1d", x, weight, bias, initial_states, None)
    return empty_as(x), _states(x, weight)


def fake_packed(
    x: Tensor, weight: Tensor, bias: Tensor, seq_idx: Tensor, silu: bool
) -> tuple[Tensor, Tensor]:
    """Empty outputs of `fuseport::causal_conv1d_packed`."""
    check("causal_conv1d_packed", x, weight, bias, None, seq_idx)
    return empty_as(x), _states(x, weight)


def fake_conv_backward(
    dout: Tensor,
    dfinal_states: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    initial_states: Tensor,
    silu: bool,
) -> tuple[Tensor, ...]:
    """Empty outputs of `fuseport::causal_conv1d_backward`."""
    op = "causal_conv1d_backward"
    check(op, x, weight, bias, initial_states, None)
    check_cotangents(op, dout, dfinal_states, x, weight)
    return empty_as(x), _flat(weight), _flat(bias), _states(x, weight)


def fake_packed_backward(
    dout: Tensor,
    dfinal_states: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    seq_idx: Tensor,
    silu: bool,
) -> tuple[Tensor, ...]:
    """Empty outputs of `fuseport::causal_conv1d_packed_backward`."""
    op = "causal_conv1d_packed_backward"
    check(op, x, weight, bias, None, seq_idx)
    check_cotangents(op, dout, dfinal_states, x, weight)
    return empty_as(x), _flat(weight), _flat(bias)
