"""The layer in plain torch, forward and backward: what the kernels are held against.

Any device, and any dtype that the op takes; in float64 it is the truth of a verification.

    out = x·Wᵀ + bias        dx = dout·W        dbias = Σ_rows dout

with W from `storage.dequantize_4bit`, which has no gradient.
"""

from torch import Tensor

from fuseport.ops.nf4_linear.shapes import check, check_backward
from fuseport.ops.nf4_linear.storage import QUANT_TYPES, dequantize_4bit
from fuseport.ops.stored_linear import linear, linear_backward

__all__ = ["nf4_linear", "nf4_linear_backward"]


def nf4_linear(
    x: Tensor,
    packed: Tensor,
    absmax: Tensor,
    bias: Tensor,
    in_features: int,
    block_size: int,
    quant_type: int = 1,
) -> Tensor:
    """(…, out_features), in x's dtype; differentiable in x and bias."""
    check("nf4_linear", x, packed, absmax, bias, in_features, block_size, quant_type)
    weight = dequantize_4bit(
        packed, absmax.detach(), (bias.shape[0], in_features), block_size, QUANT_TYPES[quant_type]
    )
    return linear(x, weight, bias)


def nf4_linear_backward(
    dout: Tensor,
    packed: Tensor,
    absmax: Tensor,
    in_features: int,
    block_size: int,
    quant_type: int = 1,
) -> tuple[Tensor, Tensor]:
    """dx and dbias, in dout's dtype."""
    check_backward("nf4_linear_backward", dout, packed, absmax, in_features, block_size, quant_type)
    weight = dequantize_4bit(
        packed, absmax, (dout.shape[-1], in_features), block_size, QUANT_TYPES[quant_type]
    )
    return linear_backward(dout, weight)
