"""What the inputs of the layer must be, and the shapes, dtypes and strides of its outputs.

`checks.hpp` has the same checks in the same order with the same messages, for hosts that have no
Python. All outputs are contiguous, whatever the inputs are.
"""

import torch
from torch import Tensor

from fuseport.ops.checks import dtype_name, require, require_like, require_shape
from fuseport.ops.matmul_nbits.storage import groups_of, require_sizes, row_bytes

__all__ = ["check", "check_backward", "fake_linear", "fake_linear_backward", "wide"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def wide(dtype: torch.dtype) -> torch.dtype:
    """What a layer of that dtype is computed in, and the dtype of its scales."""
    return torch.float64 if dtype == torch.float64 else torch.float32


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
    _check_rows(op, "x", "(..., in_features)", x)
    sizes = (*x.shape[:-1], in_features)
    require_shape(op, "x", x, "(..., in_features)", sizes)
    require_like(op, "bias", bias, x.dtype, x, "x")
    require(bias.dim() == 1, op, "bias", "(out_features,)", tuple(bias.shape))
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
    _check_rows(op, "dout", "(..., out_features)", dout)
    weight = (packed, scales, zero_points)
    _check_weight(op, "dout", dout, weight, dout.shape[-1], in_features, bits, group_size)


def _check_rows(op: str, name: str, meaning: str, t: Tensor) -> None:
    require(t.dim() >= 1, op, name, meaning, tuple(t.shape))
    known = "float16, bfloat16, float32 or float64"
    require(t.dtype in _DTYPES, op, name, known, dtype_name(t.dtype))


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
    return torch.empty((*x.shape[:-1], bias.shape[0]), dtype=x.dtype, device=x.device)


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
    dx = torch.empty((*dout.shape[:-1], in_features), dtype=dout.dtype, device=dout.device)
    return dx, torch.empty((dout.shape[-1],), dtype=dout.dtype, device=dout.device)
