"""What the inputs of the layer must be, and the shapes, dtypes and strides of its outputs.

`checks.hpp` has the same checks in the same order with the same messages, for hosts that have no
Python. All outputs are contiguous, whatever the inputs are.
"""

import torch
from torch import Tensor

from fuseport.ops.checks import require, require_like, require_shape
from fuseport.ops.matmul_nbits.storage import groups_of, require_sizes, row_bytes
from fuseport.ops.rms_norm.shapes import wide
from fuseport.ops.stored_linear import check_layer, check_rows, empty, empty_backward

__all__ = ["check", "check_backward", "fake_linear", "fake_linear_backward"]


def check(
    op: str,
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    zero_points: Tensor,
    bias: Tensor,
    in_features: int,
    bits: int,
    group_size: int,
) -> None:
    """Raises ValueError, naming `op` and the argument, unless the inputs fit each other."""
    check_layer(op, x, bias, in_features)
    weight = (packed, scales, zero_points)
    _check_weight(op, "x", x, weight, bias.shape[0], in_features, bits, group_size)


def check_backward(
    op: str,
    dout: Tensor,
    packed: Tensor,
    scales: Tensor,
    zero_points: Tensor,
    in_features: int,
    bits: int,
    group_size: int,
) -> None:
    """Raises ValueError unless cotangent and weight fit each other."""
    check_rows(op, "dout", "(..., out_features)", dout)
    weight = (packed, scales, zero_points)
    _check_weight(op, "dout", dout, weight, dout.shape[-1], in_features, bits, group_size)


def _check_weight(
    op: str,
    first_name: str,
    first: Tensor,
    weight: tuple[Tensor, Tensor, Tensor],
    out_features: int,
    in_features: int,
    bits: int,
    group_size: int,
) -> None:
    """Raises ValueError unless the weight's storage fits the sizes, and the op's first input."""
    require_sizes(op, bits, group_size)
    require(in_features >= 0, op, "in_features", "not negative", in_features)
    packed, scales, zero_points = weight
    groups = groups_of(in_features, group_size)
    require_like(op, "packed", packed, torch.uint8, first, first_name)
    sizes = (out_features, groups, row_bytes(group_size, bits))
    require_shape(op, "packed", packed, "(out_features, groups, group_size*bits/8)", sizes)
    require_like(op, "scales", scales, wide(first.dtype), first, first_name)
    require_shape(op, "scales", scales, "(out_features, groups)", (out_features, groups))
    require_like(op, "zero_points", zero_points, torch.uint8, first, first_name)
    of_zeros = (out_features, row_bytes(groups, bits))
    require_shape(op, "zero_points", zero_points, "(out_features, groups*bits/8)", of_zeros)


def fake_linear(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    zero_points: Tensor,
    bias: Tensor,
    in_features: int,
    bits: int,
    group_size: int,
) -> Tensor:
    """The empty output of `fuseport::matmul_nbits`."""
    weight = (packed, scales, zero_points)
    check("matmul_nbits", x, *weight, bias, in_features, bits, group_size)
    return empty(x, bias)


def fake_linear_backward(
    dout: Tensor,
    packed: Tensor,
    scales: Tensor,
    zero_points: Tensor,
    in_features: int,
    bits: int,
    group_size: int,
) -> tuple[Tensor, Tensor]:
    """Empty outputs of `fuseport::matmul_nbits_backward`."""
    weight = (packed, scales, zero_points)
    check_backward("matmul_nbits_backward", dout, *weight, in_features, bits, group_size)
    return empty_backward(dout, in_features)
