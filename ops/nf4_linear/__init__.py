"""A linear layer whose frozen weight is stored in four bits, with LoRA adapters beside it.

Source: Dettmers, Pagnoni, Holtzman & Zettlemoyer, "QLoRA: Efficient finetuning of quantized LLMs",
2023, equation 5; `storage` has the format of the weight, which is that of bitsandbytes.
"""

import torch
from torch import Tensor

from fuseport.ops import registration
from fuseport.ops.checks import require, require_like, require_shape
from fuseport.ops.evidence import Evidence
from fuseport.ops.nf4_linear import reference, shapes
from fuseport.ops.nf4_linear.cases import BENCH, BUGS, CASES
from fuseport.ops.nf4_linear.storage import (
    QUANT_TYPES,
    Weight4bit,
    dequantize_4bit,
    dequantize_absmax,
    from_bitsandbytes,
    quantize_4bit,
)
from fuseport.ops.rms_norm.shapes import wide
from fuseport.ops.spec import Operator, OpSpec

__all__ = [
    "SPEC",
    "Weight4bit",
    "dequantize_4bit",
    "dequantize_absmax",
    "from_bitsandbytes",
    "nf4_linear",
    "quantize_4bit",
]


def nf4_linear(
    x: Tensor,
    packed: Tensor,
    absmax: Tensor,
    out_features: int,
    bias: Tensor | None = None,
    lora_A: Tensor | None = None,  # as LoRA's checkpoints name it
    lora_B: Tensor | None = None,
    scaling: float = 1.0,
    block_size: int = 64,
    quant_type: str = "nf4",
) -> Tensor:
    """x·Wᵀ + bias + scaling·(x·Aᵀ)·Bᵀ, with W in four bits, as `quantize_4bit` stores it.

    The first product is computed in float32, or float64 for a float64 `x`, and rounded once, bias
    included; W is never whole in memory. That of LoRA is two products of torch's. On CUDA, for more
    than 64 rows, torch multiplies tiles of W, of 32 MiB or one of 64 rows or columns, whose values
    are rounded to x's dtype, as bitsandbytes rounds them; so it does for more than 16, and in the
    backward, where `in_features` is no multiple of 64 or blocks are smaller than 64, and in the
    backward where `out_features` is no multiple of 16.

    Args:
        x: (…, in), float16, bfloat16, float32 or float64, in any memory layout.
        packed: uint8, ⌈out·in/2⌉ bytes in any shape.
        absmax: float32, or float64 beside a float64 `x`, (⌈out·in/block_size⌉,).
        out_features: out.
        bias: (out,), x's dtype; None means zeros.
        lora_A: (r, in), x's dtype; given where `lora_B` is.
        lora_B: (out, r), x's dtype.
        scaling: of LoRA's part.
        block_size: a power of two from 16 up.
        quant_type: the code, "nf4", or "fp4", which is bitsandbytes' default.

    Returns:
        (…, out), x's dtype; differentiable, once, in `x`, `bias`, `lora_A` and `lora_B`, never in
        the weight.

    Raises:
        ValueError: a shape, dtype, device or number does not fit; the message names the argument.
    """
    registration.ensure(SPEC)
    require(x.dim() >= 1, "nf4_linear", "x", "(..., in_features)", tuple(x.shape))
    in_features = x.shape[-1]
    if absmax.dtype == torch.float32:  # beside float64, where it is exact
        absmax = absmax.to(wide(x.dtype))
    require(quant_type in QUANT_TYPES, "nf4_linear", "quant_type", "nf4 or fp4", quant_type)
    if bias is None:
        bias = x.new_zeros(out_features)
    require_shape("nf4_linear", "bias", bias, "(out_features,)", (out_features,))
    out: Tensor = torch.ops.fuseport.nf4_linear(
        x, packed.reshape(-1), absmax, bias, in_features, block_size, QUANT_TYPES.index(quant_type)
    )
    require((lora_A is None) == (lora_B is None), "nf4_linear", "lora_B", "given with lora_A", None)
    if lora_A is None or lora_B is None:
        return out
    require(lora_A.dim() == 2, "nf4_linear", "lora_A", "(r, in_features)", tuple(lora_A.shape))
    rank = lora_A.shape[0]
    require_like("nf4_linear", "lora_A", lora_A, x.dtype, x, "x")
    require_shape("nf4_linear", "lora_A", lora_A, "(r, in_features)", (rank, in_features))
    require_like("nf4_linear", "lora_B", lora_B, x.dtype, x, "x")
    require_shape("nf4_linear", "lora_B", lora_B, "(out_features, r)", (out_features, rank))
    return out + (x @ lora_A.T) @ lora_B.T * scaling


SPEC = OpSpec(
    name="nf4_linear",
    package=__name__,
    function=nf4_linear,
    operators=(
        Operator(
            name="nf4_linear",
            schema="(Tensor x, Tensor packed, Tensor absmax, Tensor bias, int in_features, "
            "int block_size, int quant_type=1) -> Tensor out",
            reference=reference.nf4_linear,
            fake=shapes.fake_linear,
            backward="nf4_linear_backward",
        ),
        Operator(
            name="nf4_linear_backward",
            schema="(Tensor dout, Tensor packed, Tensor absmax, int in_features, int block_size, "
            "int quant_type=1) -> (Tensor dx, Tensor dbias)",
            reference=reference.nf4_linear_backward,
            fake=shapes.fake_linear_backward,
        ),
    ),
    cases=CASES,
    bugs=BUGS,
    no_bugs={
        "passes through: nf4_linear_backward: dbias = dout": "the two look alike only where there "
        "is one row, and there the cotangent is the bias's gradient"
    },
    keeps_float32=(".absmax",),
    stands_for=(
        "bitsandbytes",
        "linear4bit",
        "Linear4bit",
        "MatMul4Bit",
        "gemv_4bit",
        "dequantize_4bit",
        "dequantize_blockwise",
    ),
    bench=BENCH,
    evidence=tuple(
        Evidence(
            f"a linear layer in {quant_type.upper()}, of bitsandbytes",
            {"weight.absmax": (None,), f"weight.quant_state.bitsandbytes__{quant_type}": (None,)},
        )
        for quant_type in QUANT_TYPES
    ),
)
