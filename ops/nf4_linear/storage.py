"""Weights in NF4: the code, quantising, dequantising, and reading what bitsandbytes stores.

Source: Dettmers, Pagnoni, Holtzman & Zettlemoyer, "QLoRA: Efficient finetuning of quantized LLMs",
2023, appendix E, for the 16 values; bitsandbytes for how they are stored. A weight (out, in) is a
row of out·in values. Each block of `block_size` of them, the last perhaps a short one, has its
largest magnitude, absmax, and each value is absmax·CODE[index]. Two indices are a byte, the first
in its high half.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fuseport.ops.checks import dtype_name, require

__all__ = [
    "BLOCK_SIZE",
    "CODE",
    "Nf4Weight",
    "code_for",
    "dequantize_absmax",
    "dequantize_nf4",
    "from_bitsandbytes",
    "quantize_nf4",
]

BLOCK_SIZE = 64
"""The usual size of a block."""

CODE = (
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
)
"""NormalFloat4: numbers of float32, written in full."""

_OP = "nf4_linear"


@dataclass(frozen=True)
class Nf4Weight:
    """A stored weight: its indices, packed, the absmax of each block, its shape (out, in)."""

    packed: Tensor
    absmax: Tensor
    shape: tuple[int, int]
    block_size: int = BLOCK_SIZE


def code_for(t: Tensor) -> Tensor:
    """The code as a tensor of `t`'s dtype, where `t` is."""
    return torch.tensor(CODE, dtype=t.dtype, device=t.device)


def quantize_nf4(weight: Tensor, block_size: int = BLOCK_SIZE) -> tuple[Tensor, Tensor]:
    """A weight's values as nearest ones of the code; of two as near, the lower.

    Args:
        weight: (out, in), or of any shape, floating; all finite.
        block_size: a power of two from 16 up.

    Returns:
        `packed`, uint8, (⌈out·in/2⌉,), and `absmax`, float32, (⌈out·in/block_size⌉,).

    Raises:
        ValueError: a dtype, a size or a value does not fit; the message names the argument.
    """
    require(weight.is_floating_point(), _OP, "weight", "floating", dtype_name(weight.dtype))
    _require_block_size(block_size)
    values = weight.detach().reshape(-1).float()
    require(bool(values.isfinite().all()), _OP, "weight", "finite", "Inf or NaN")
    blocks = torch.nn.functional.pad(values, (0, -len(values) % block_size))
    blocks = blocks.reshape(-1, block_size)
    absmax = blocks.abs().amax(1)
    # A block of zeros has any scale.
    scaled = blocks / torch.where(absmax > 0, absmax, 1)[:, None]
    code = torch.tensor(CODE, dtype=torch.float64, device=weight.device)
    between = ((code[1:] + code[:-1]) / 2).float()
    index = torch.bucketize(scaled, between).to(torch.uint8).reshape(-1)[: len(values)]
    pairs = torch.nn.functional.pad(index, (0, len(index) % 2)).reshape(-1, 2)
    return (pairs[:, 0] << 4) | pairs[:, 1], absmax


def dequantize_nf4(
    packed: Tensor, absmax: Tensor, shape: tuple[int, ...], block_size: int = BLOCK_SIZE
) -> Tensor:
    """The values of a stored weight, in absmax's dtype.

    Args:
        packed: uint8, half as many as the shape has values, rounded up, in any shape.
        absmax: float32 or float64, one for each block.
        shape: of the weight.
        block_size: a power of two from 16 up.

    Raises:
        ValueError: a dtype or a size does not fit; the message names the argument.
    """
    _require_block_size(block_size)
    count = 1
    for size in shape:
        count *= size
    require(packed.dtype == torch.uint8, _OP, "packed", "uint8", dtype_name(packed.dtype))
    pairs, blocks = (count + 1) // 2, (count + block_size - 1) // block_size
    require(packed.numel() == pairs, _OP, "packed", f"of {pairs} bytes", packed.numel())
    require(absmax.numel() == blocks, _OP, "absmax", f"of {blocks} blocks", absmax.numel())
    packed, absmax = packed.reshape(-1), absmax.reshape(-1)
    index = torch.stack([packed >> 4, packed & 15], 1).reshape(-1)[:count]
    values = code_for(absmax)[index.int()]
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


def from_bitsandbytes(tensors: Mapping[str, Tensor], name: str) -> Nf4Weight:
    """A weight from the tensors that bitsandbytes saves for one, 4-bit and NF4.

    Args:
        tensors: of a checkpoint: `<name>`, `<name>.absmax`, `<name>.quant_map`,
            `<name>.quant_state.bitsandbytes__nf4`, and, where absmax is quantised too,
            `<name>.nested_absmax` and `<name>.nested_quant_map`.
        name: of the weight: `model.layers.0.self_attn.q_proj.weight`.

    Raises:
        KeyError: one of these is missing.
        ValueError: its code is not NF4's, or its sizes do not fit.
    """
    state = json.loads(bytes(tensors[f"{name}.quant_state.bitsandbytes__nf4"].tolist()))
    code = tensors[f"{name}.quant_map"].cpu().float()
    is_nf4 = code.shape == (16,) and torch.allclose(code, torch.tensor(CODE), rtol=0, atol=1e-6)
    require(is_nf4, _OP, f"{name}.quant_map", "the code of NF4", code.tolist())
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
    return Nf4Weight(packed, absmax.float(), (out_features, in_features), block_size)


def _require_block_size(block_size: int) -> None:
    power = block_size >= 16 and block_size & (block_size - 1) == 0
    require(power, _OP, "block_size", "a power of two from 16 up", block_size)
