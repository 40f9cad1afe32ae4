"""A linear layer whose frozen weight is stored in a few bits, in groups with zero points.

`storage` has the format of the weight, which is that of ONNX Runtime's MatMulNBits, and reads
what GPTQ's and AWQ's packages save.
"""

import torch
from torch import Tensor

from fuseport.ops import registration
from fuseport.ops.checks import require, require_shape
from fuseport.ops.evidence import Evidence
from fuseport.ops.matmul_nbits import reference, shapes
from fuseport.ops.matmul_nbits.cases import BENCH, BUGS, CASES
from fuseport.ops.matmul_nbits.storage import (
    WeightNBits,
    dequantize_nbits,
    from_awq,
    from_compressed_tensors,
    from_gptq,
    quantize_nbits,
)
from fuseport.ops.rms_norm.shapes import wide
from fuseport.ops.spec import Operator, OpSpec

__all__ = [
    "SPEC",
    "WeightNBits",
    "dequantize_nbits",
    "from_awq",
    "from_compressed_tensors",
    "from_gptq",
    "matmul_nbits",
    "quantize_nbits",
]


def matmul_nbits(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    zero_points: Tensor,
    bias: Tensor | None = None,
    bits: int = 4,
    group_size: int = 128,
) -> Tensor:
    """x·Wᵀ + bias, with W in a few bits, as `quantize_nbits` stores it.

    W is (code - zero_point)·scale. The product is computed in float32, or float64 for a float64
    `x`, and rounded once, bias included; W is never whole in memory. On CUDA, for more than 16 rows
    and in the backward, torch multiplies tiles of W, of 32 MiB or one of 64 rows or columns, whose
    values are rounded to x's dtype.

    Args:
        x: (…, in), float16, bfloat16, float32 or float64, in any memory layout.
        packed: uint8, (out, groups, group_size·bits/8): codes along `in`, the first in the lowest
            bits; what a row's last group has beyond `in` is nothing.
        scales: float32, or float64 beside a float64 `x`, (out, groups).
        zero_points: uint8, (out, ⌈groups·bits/8⌉), packed as codes are.
        bias: (out,), x's dtype; None means zeros.
        bits: of a code: 2, 4 or 8.
        group_size: a multiple of 16.

    Returns:
        (…, out), x's dtype; differentiable, once, in `x` and `bias`, never in the weight.

    Raises:
        ValueError: a shape, dtype, device or number does not fit; the message names the argument.
    """
    registration.ensure(SPEC)
    require(x.dim() >= 1, "matmul_nbits", "x", "(..., in_features)", tuple(x.shape))
    require(scales.dim() == 2, "matmul_nbits", "scales", "(out, groups)", tuple(scales.shape))
    if scales.dtype == torch.float32:  # beside float64, where it is exact
        scales = scales.to(wide(x.dtype))
    out_features = scales.shape[0]
    if bias is None:
        bias = x.new_zeros(out_features)
    require_shape("matmul_nbits", "bias", bias, "(out_features,)", (out_features,))
    out: Tensor = torch.ops.fuseport.matmul_nbits(
        x, packed, scales, zero_points, bias, x.shape[-1], bits, group_size
    )
    return out


SPEC = OpSpec(
    name="matmul_nbits",
    package=__name__,
    function=matmul_nbits,
    operators=(
        Operator(
            name="matmul_nbits",
            schema="(Tensor x, Tensor packed, Tensor scales, Tensor zero_points, Tensor bias, "
            "int in_features, int bits, int group_size) -> Tensor out",
            reference=reference.matmul_nbits,
            fake=shapes.fake_linear,
            backward="matmul_nbits_backward",
        ),
        Operator(
            name="matmul_nbits_backward",
            schema="(Tensor dout, Tensor packed, Tensor scales, Tensor zero_points, "
            "int in_features, int bits, int group_size) -> (Tensor dx, Tensor dbias)",
            reference=reference.matmul_nbits_backward,
            fake=shapes.fake_linear_backward,
        ),
    ),
    cases=CASES,
    bugs=BUGS,
    no_bugs={
        "passes through: matmul_nbits_backward: dbias = dout": "the two look alike only where "
        "there is one row, and there the cotangent is the bias's gradient"
    },
    keeps_float32=(".scales",),
    stands_for=(
        "MatMulNBits",
        "WQLinear",
        "gptq_gemm",
        "gptq_marlin_gemm",
        "awq_gemm",
        "awq_dequantize",
        "gemm_forward_cuda",
        "vecquant4matmul",
        "vecquant8matmul",
    ),
    bench=BENCH,
    evidence=(
        Evidence(
            "a linear layer of GPTQ or AWQ",
            {"qweight": (None, None), "qzeros": (None, None), "scales": (None, None)},
        ),
        Evidence(
            "a linear layer of compressed-tensors",
            {"weight_packed": (None, None), "weight_scale": (None, None), "weight_shape": (2,)},
        ),
    ),
)
