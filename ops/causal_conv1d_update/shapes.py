"""What the inputs of a decoding step must be, and the shapes, dtypes and strides of its outputs.

`torch.cpp` has the same checks in the same order with the same messages, for hosts that have no
Python; a test holds the two against each other.
"""

import torch
from torch import Tensor

from fuseport.ops.checks import dtype_name, require, require_like, require_shape
from fuseport.ops.spec import FLOATING

__all__ = ["check", "fake_circular", "fake_update"]


def check(
    op: str,
    x: Tensor,
    conv_state: Tensor,
    cache_seqlens: Tensor | None,
    weight: Tensor,
    bias: Tensor,
) -> None:
    """Raises ValueError, naming `op` and the argument, unless the inputs fit each other."""
    require(x.dim() == 3, op, "x", "(b, d, l)", tuple(x.shape))
    name = dtype_name(x.dtype)
    require(x.dtype in FLOATING, op, "x", "float16, bfloat16, float32 or float64", name)
    b, d, _ = x.shape
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    require_like(op, "weight", weight, wide if weight.dtype == wide else x.dtype, x, "x")
    require(weight.dim() == 2, op, "weight", "(d, W)", tuple(weight.shape))
    width = weight.shape[1]
    require(width >= 1, op, "weight", "of width 1 or more", width)
    require_shape(op, "weight", weight, "(d, W)", (d, width))
    require_like(op, "bias", bias, weight.dtype, x, "x")
    require_shape(op, "bias", bias, "(d,)", (d,))
    require_like(op, "conv_state", conv_state, x.dtype, x, "x")
    require(conv_state.dim() == 3, op, "conv_state", "(b, d, S)", tuple(conv_state.shape))
    slots = conv_state.shape[2]
    require_shape(op, "conv_state", conv_state, "(b, d, S)", (b, d, slots))
    least = 1 if cache_seqlens is not None and width == 1 else width - 1
    require(slots >= least, op, "conv_state", f"of {least} slots or more", slots)
    if cache_seqlens is not None:
        require_like(op, "cache_seqlens", cache_seqlens, torch.int32, x, "x")
        require_shape(op, "cache_seqlens", cache_seqlens, "(b,)", (b,))


def _flat(t: Tensor) -> Tensor:
    return torch.empty(t.shape, dtype=t.dtype, device=t.device)


def fake_update(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor, silu: bool
) -> tuple[Tensor, Tensor]:
    """Empty outputs of `fuseport::causal_conv1d_update`."""
    check("causal_conv1d_update", x, conv_state, None, weight, bias)
    return _flat(x), _flat(conv_state)


def fake_circular(
    x: Tensor, conv_state: Tensor, cache_seqlens: Tensor, weight: Tensor, bias: Tensor, silu: bool
) -> tuple[Tensor, Tensor]:
    """Empty outputs of `fuseport::causal_conv1d_update_circular`."""
    check("causal_conv1d_update_circular", x, conv_state, cache_seqlens, weight, bias)
    return _flat(x), _flat(conv_state)
