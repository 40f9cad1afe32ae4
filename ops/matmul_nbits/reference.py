"""The layer in plain torch, forward and backward: what the kernels are held against.

Any device, and any dtype that the op takes; in float64 it is the truth of a verification.

    out = x·Wᵀ + bias        dx = dout·W        dbias = Σ_rows dout

with W from `storage.dequantize_nbits`, which has no gradient.
"""

from torch import Tensor

from fuseport.ops.matmul_nbits.shapes import check, check_backward
from fuseport.ops.matmul_nbits.storage import dequantize_nbits
from fuseport.ops.stored_linear import linear, linear_backward

__all__ = ["matmul_nbits", "matmul_nbits_backward"]


def matmul_nbits(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    zero_points: Tensor,
    bias: Tensor,
    in_features: int,
    bits: int,
    group_size: int,
) -> Tensor:
    """(…, out_features), in x's dtype; differentiable in x and bias."""
    weight = (packed, scales.detach(), zero_points)
    check("matmul_nbits", x, *weight, bias, in_features, bits, group_size)
    return linear(x, dequantize_nbits(*weight, in_features, bits), bias)


def matmul_nbits_backward(
    dout: Tensor,
    packed: Tensor,
    scales: Tensor,
    zero_points: Tensor,
    in_features: int,
    bits: int,
    group_size: int,
) -> tuple[Tensor, Tensor]:
    """dx and dbias, in dout's dtype."""
    weight = (packed, scales, zero_points)
    check_backward("matmul_nbits_backward", dout, *weight, in_features, bits, group_size)
    return linear_backward(dout, dequantize_nbits(*weight, in_features, bits))
