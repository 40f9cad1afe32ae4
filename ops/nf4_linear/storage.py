"""Weights in four bits: the codes, quantising, dequantising, and reading what bitsandbytes stores.

Source: Dettmers, Pagnoni, Holtzman & Zettlemoyer, "QLoRA: Efficient finetuning of quantized LLMs",
2023, appendix E, for the 16 values of NF4; bitsandbytes for those of FP4, and for how weights are
stored. A weight (out, in) is a row of out·in values. Each block of `block_size` of them, the last
perhaps a short one, has its largest magnitude, absmax, and each value is absmax·code[index]. Two
indices are a byte, the first in its high half.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fuseport.ops.checks import dtype_name, require

__all__ = [
    "BLOCK_SIZE",
    "CODES",
    "QUANT_TYPES",
    "Weight4bit",
    "code_for",
    "dequantize_4bit",
    "dequantize_absmax",
    "from_bitsandbytes",
    "quantize_4bit",
]

BLOCK_SIZE = 64
"""The usual size of a block."""

CODES = {
    # A sign, two bits of exponent and one of mantissa, of the largest; there are two zeros.
    "fp4": (
        0.0,
        0.0052083334885537624,
        0.6666666865348816,
        1.0,
        0.3333333432674408,
        0.5,
        0.1666666716337204,
        0.25,
        0.0,
        -0.0052083334885537624,
        -0.6666666865348816,
        -1.0,
        -0.3333333432674408,
        -0.5,
        -0.1666666716337204,
        -0.25,
    ),
    # NormalFloat4.
    "nf4": (
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ),
}
"""By the name that bitsandbytes has for a code, its values: numbers of float32, written in full."""

QUANT_TYPES = ("fp4", "nf4")
"""The codes by the number that operators have for one: ONNX Runtime's of its MatMulBnb4."""

_OP = "nf4_linear"


@dataclass(frozen=True)
class Weight4bit:
    """A stored weight: its indices, packed, the absmax of each block, its shape (out, in)."""

    packed: Tensor
    absmax: Tensor
    shape: tuple[int, int]
    block_size: int = BLOCK_SIZE
    quant_type: str = "nf4"


def code_for(t: Tensor, quant_type: str = "nf4") -> Tensor:
    """A code as a tensor of `t`'s dtype, where `t` is."""
    return torch.tensor(CODES[quant_type], dtype=t.dtype, device=t.device)


def quantize_4bit(
    weight: Tensor, block_size: int = BLOCK_SIZE, quant_type: str = "nf4"
) -> tuple[Tensor, Tensor]:
    """A weight's values as nearest ones of a code; of two as near, the lower.

    Args:
        weight: (out, in), or of any shape, floating; all finite.
        block_size: a power of two from 16 up.
        quant_type: the code, "nf4" or "fp4".

    Returns:
        `packed`, uint8, (⌈out·in/2⌉,), and `absmax`, float32, (⌈out·in/block_size⌉,).

    Raises:
        ValueError: a dtype, a size or a value does not fit; the message names the argument.
    """
    require(weight.is_floating_point(), _OP, "weight", "floating", dtype_name(weight.dtype))
    _require_block_size(block_size)
    _require_quant_type(quant_type)
    values = weight.detach().reshape(-1).float()
    require(bool(values.isfinite().all()), _OP, "weight", "finite", "Inf or NaN")
    blocks = torch.nn.functional.pad(values, (0, -len(values) % block_size))
    blocks = blocks.reshape(-1, block_size)
    absmax = blocks.abs().amax(1)
    # A block of zeros has any scale.
    scaled = blocks / torch.where(absmax > 0, absmax, 1)[:, None]
    code, order = code_for(values.double(), quant_type).sort(stable=True)
    between = ((code[1:] + code[:-1]) / 2).float()
    index = order.to(torch.uint8)[torch.bucketize(scaled, between)].reshape(-1)[: len(values)]
    pairs = torch.nn.functional.pad(index, (0, len(index) % 2)).reshape(-1, 2)
    return (pairs[:, 0] << 4) | pairs[:, 1], absmax


def dequantize_4bit(
    packed: Tensor,
    absmax: Tensor,
    shape: tuple[int, ...],
    block_size: int = BLOCK_SIZE,
    quant_type: str = "nf4",
) -> Tensor:
    """The values of a stored weight, in absmax's dtype.

    Args:
        packed: uint8, half as many as the shape has values, rounded up, in any shape.
        absmax: float32 or float64, one for each block.
        shape: of the weight.
        block_size: a power of two from 16 up.
        quant_type: the code, "nf4" or "fp4".

    Raises:
        ValueError: a dtype or a size does not fit; the message names the argument.
    """
    _require_block_size(block_size)
    _require_quant_type(quant_type)
    count = 1
    for size in shape:
        count *= size
    require(packed.dtype == torch.uint8, _OP, "packed", "uint8", dtype_name(packed.dtype))
    pairs, blocks = (count + 1) // 2, (count + block_size - 1) // block_size
    require(packed.numel() == pairs, _OP, "packed", f"of {pairs} bytes", packed.numel())
    require(absmax.numel() == blocks, _OP, "absmax", f"of {blocks} blocks", absmax.numel())
    packed, absmax = packed.reshape(-1), absmax.reshape(-1)
    index = torch.stack([packed >> 4, packed & 15], 1).reshape(-1)[:count]
    values = code_for(absmax, quant_type)[index.int()]
    return (values * absmax.repeat_interleave(block_size)[:count]).reshape(shape)


def dequantize_absmax(
    absmax: Tensor, code: Tensor, nested_absmax: Tensor, offset: float, block_size: int = 256
) -> Tensor:
    """The absmax of blocks that bitsandbytes has quantised again, "double quantisation".

    Args:
        absmax: uint8, (blocks,): indices into `code`.
        code: (256,), float32.
        nested_absmax: float32, one for each `block_size` of absmax.
        offset: that was taken off all of them.
        block_size: how many of absmax share a scale.

    Returns:
        (blocks,), float32.

    Raises:
        ValueError: a dtype or a size does not fit; the message names the argument.
    """
    require(absmax.dtype == torch.uint8, _OP, "absmax", "uint8", dtype_name(absmax.dtype))
    require(code.numel() == 256, _OP, "code", "of 256 values", code.numel())
    absmax, nested = absmax.reshape(-1), nested_absmax.reshape(-1).float()
    blocks = (len(absmax) + block_size - 1) // block_size
    require(len(nested) == blocks, _OP, "nested_absmax", f"of {blocks} blocks", len(nested))
    scale = nested.repeat_interleave(min(block_size, len(absmax)))[: len(absmax)]
    return code.reshape(-1).float()[absmax.int()] * scale + offset


def from_bitsandbytes(tensors: Mapping[str, Tensor], name: str) -> Weight4bit:
    """A weight from the tensors that bitsandbytes saves for one in four bits.

    Args:
        tensors: of a checkpoint: `<name>`, `<name>.absmax`, `<name>.quant_map`,
            `<name>.quant_state.bitsandbytes__nf4` or `…__fp4`, and, where absmax is quantised too,
            `<name>.nested_absmax` and `<name>.nested_quant_map`.
        name: of the weight: `model.layers.0.self_attn.q_proj.weight`.

    Raises:
        KeyError: one of these is missing.
        ValueError: its code is not that, or its sizes do not fit.
    """
    marked = f"{name}.quant_state.bitsandbytes__"
    quant_type = "fp4" if f"{marked}fp4" in tensors else "nf4"
    state = json.loads(bytes(tensors[marked + quant_type].tolist()))
    code = tensors[f"{name}.quant_map"].cpu().float()
    known = code.shape == (16,) and torch.allclose(code, code_for(code, quant_type), 0, 1e-6)
    require(known, _OP, f"{name}.quant_map", f"the code of {quant_type.upper()}", code.tolist())
    absmax = tensors[f"{name}.absmax"]
    if absmax.dtype == torch.uint8:
        absmax = dequantize_absmax(
            absmax,
            tensors[f"{name}.nested_quant_map"],
            tensors[f"{name}.nested_absmax"],
            state["nested_offset"],
            state["nested_blocksize"],
        )
    out_features, in_features = state["shape"]
    packed = tensors[name].reshape(-1).view(torch.uint8)  # of any dtype, quant_storage
    block_size = state["blocksize"]
    _require_block_size(block_size)
    pairs = (out_features * in_features + 1) // 2
    require(packed.numel() == pairs, _OP, name, f"of {pairs} bytes", packed.numel())
    shape = (out_features, in_features)
    return Weight4bit(packed, absmax.float(), shape, block_size, quant_type)


def _require_block_size(block_size: int) -> None:
    power = block_size >= 16 and block_size & (block_size - 1) == 0
    require(power, _OP, "block_size", "a power of two from 16 up", block_size)


def _require_quant_type(quant_type: str) -> None:
    require(quant_type in CODES, _OP, "quant_type", "nf4 or fp4", quant_type)
