"""What the inputs of the layer must be, and the shapes, dtypes and strides of its outputs.

`checks.hpp` has the same checks in the same order with the same messages, for hosts that have no
Python. All outputs are contiguous, whatever the inputs are.
"""

import torch
from torch import Tensor

from fuseport.ops.checks import require, require_like, require_shape
from fuseport.ops.rms_norm.shapes import wide
from fuseport.ops.stored_linear import check_layer, check_rows, empty, empty_backward

__all__ = ["check", "check_backward", "fake_linear", "fake_linear_backward"]


def check(
    op: str,
    x: Tensor,
    packed: Tensor,
    absmax: Tensor,
    bias: Tensor,
    in_features: int,
    block_size: int,
    quant_type: int,
) -> None:
    """Raises ValueError, naming `op` and the argument, unless the inputs fit each other."""
    check_layer(op, x, bias, in_features)
    _check_weight(op, "x", x, packed, absmax, bias.shape[0], in_features, block_size, quant_type)


def _check_weight(
    op: str,
    first_name: str,
    first: Tensor,
    packed: Tensor,
    absmax: Tensor,
    out_features: int,
    in_features: int,
    block_size: int,
    quant_type: int,
) -> None:
    """Raises ValueError unless the weight's storage fits the sizes, and the op's first input."""
    power = block_size >= 16 and block_size & (block_size - 1) == 0
    require(power, op, "block_size", "a power of two from 16 up", block_size)
    require(quant_type in (0, 1), op, "quant_type", "0 (FP4) or 1 (NF4)", quant_type)
    require(in_features >= 0, op, "in_features", "not negative", in_features)
    values = out_features * in_features
    require_like(op, "packed", packed, torch.uint8, first, first_name)
    pairs = (values + 1) // 2
    require_shape(op, "packed", packed, "(out_features*in_features/2,)", (pairs,))
    require_like(op, "absmax", absmax, wide(first.dtype), first, first_name)
    blocks = (values + block_size - 1) // block_size
    require_shape(op, "absmax", absmax, "(out_features*in_features/block_size,)", (blocks,))


def fake_linear(
    x: Tensor,
    packed: Tensor,
    absmax: Tensor,
    bias: Tensor,
    in_features: int,
    block_size: int,
    quant_type: int = 1,
) -> Tensor:
    """The empty output of `fuseport::nf4_linear`."""
    check("nf4_linear", x, packed, absmax, bias, in_features, block_size, quant_type)
    return empty(x, bias)


def fake_linear_backward(
    dout: Tensor,
    packed: Tensor,
    absmax: Tensor,
    in_features: int,
    block_size: int,
    quant_type: int = 1,
) -> tuple[Tensor, Tensor]:
    """Empty outputs of `fuseport::nf4_linear_backward`."""
    check_backward("nf4_linear_backward", dout, packed, absmax, in_features, block_size, quant_type)
    return empty_backward(dout, in_features)


def check_backward(
    op: str,
    dout: Tensor,
    packed: Tensor,
    absmax: Tensor,
    in_features: int,
    block_size: int,
    quant_type: int,
) -> None:
    """Raises ValueError unless cotangent and weight fit each other."""
    check_rows(op, "dout", "(..., out_features)", dout)
    _check_weight(
        op, "dout", dout, packed, absmax, dout.shape[-1], in_features, block_size, quant_type
    )
