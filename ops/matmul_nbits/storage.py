"""Weights of a few bits in groups: quantising, dequantising, and reading what packages store.

A weight (out, in) has codes of 2, 4 or 8 bits. `group_size` of them in a row, the last perhaps
fewer, are a group, with a scale and a zero point: each value is (code - zero_point)·scale. They are
stored as ONNX Runtime's `com.microsoft.MatMulNBits` has them: a row is whole groups, codes follow
each other in bytes, the first in the lowest bits, and so do a row's zero points.

Sources: Frantar, Ashkboos, Hoefler & Alistarh, "GPTQ: Accurate post-training quantization for
generative pre-trained transformers", 2022, and Lin et al., "AWQ: Activation-aware weight
quantization for LLM compression and acceleration", 2023; AutoGPTQ, GPTQModel, AutoAWQ and
compressed-tensors for what they save.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fuseport.ops.checks import dtype_name, require

__all__ = [
    "BITS",
    "WeightNBits",
    "dequantize_nbits",
    "from_awq",
    "from_compressed_tensors",
    "from_gptq",
    "groups_of",
    "pack_codes",
    "quantize_nbits",
    "require_sizes",
    "row_bytes",
    "unpack_codes",
    "whole_row",
]

BITS = (2, 4, 8)
"""How many bits a code may have."""

_OP = "matmul_nbits"
_WORD = 32
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight columns is in the i-th lowest four bits of a word of AWQ's."""


@dataclass(frozen=True)
class WeightNBits:
    """A stored weight.

    Attributes:
        packed: uint8, (out, groups, group_size·bits/8).
        scales: float32, (out, groups).
        zero_points: uint8, (out, ⌈groups·bits/8⌉).
        in_features: how many codes of a row there are; what follows in its last group is nothing.
        bits: of a code.
        group_size: a multiple of 16.
        order: int64, (in,): which input a column is of, where columns are in another order than
            inputs (GPTQ's `desc_act`).
    """

    packed: Tensor
    scales: Tensor
    zero_points: Tensor
    in_features: int
    bits: int
    group_size: int
    order: Tensor | None = None


def groups_of(in_features: int, group_size: int) -> int:
    """How many groups a row has."""
    return (in_features + group_size - 1) // group_size


def row_bytes(count: int, bits: int) -> int:
    """The bytes of so many codes."""
    return (count * bits + 7) // 8


def whole_row(in_features: int) -> int:
    """The size of a group that is a whole row."""
    return max(in_features + -in_features % 16, 16)


def require_sizes(op: str, bits: int, group_size: int) -> None:
    """Raises ValueError unless an op takes codes of so many bits in such groups."""
    require(bits in BITS, op, "bits", "2, 4 or 8", bits)
    whole = group_size >= 16 and group_size % 16 == 0
    require(whole, op, "group_size", "a multiple of 16", group_size)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Codes, uint8, below 2^bits, as bytes, (…, ⌈count·bits/8⌉): the first in the lowest bits."""
    per_byte = 8 // bits
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % per_byte))
    parts = codes.reshape(*codes.shape[:-1], codes.shape[-1] // per_byte, per_byte)
    packed = parts[..., 0].clone()
    for i in range(1, per_byte):
        packed |= parts[..., i] << (i * bits)
    return packed


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """All codes that are in bytes, (…, bytes·8/bits)."""
    parts = [packed >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
    return torch.stack(parts, -1).flatten(-2)


def quantize_nbits(
    weight: Tensor, bits: int = 4, group_size: int = 128, symmetric: bool = False
) -> WeightNBits:
    """A weight by rounding each value to the nearest one that its group has.

    Args:
        weight: (out, in), floating; all finite.
        bits: of a code: 2, 4 or 8.
        group_size: a multiple of 16.
        symmetric: whether all zero points are 2^(bits-1), the middle.

    Raises:
        ValueError: a dtype, a size or a value does not fit; the message names the argument.
    """
    require_sizes(_OP, bits, group_size)
    require(weight.is_floating_point(), _OP, "weight", "floating", dtype_name(weight.dtype))
    require(weight.dim() == 2, _OP, "weight", "(out_features, in_features)", tuple(weight.shape))
    values = weight.detach().float()
    require(bool(values.isfinite().all()), _OP, "weight", "finite", "Inf or NaN")
    rows, in_features = values.shape
    groups, highest = groups_of(in_features, group_size), (1 << bits) - 1
    values = torch.nn.functional.pad(values, (0, groups * group_size - in_features))
    values = values.reshape(rows, groups, group_size)
    if symmetric:
        scales = values.abs().amax(-1) / (1 << bits - 1)
        zeros = torch.full_like(scales, 1 << bits - 1)
    else:
        low, high = values.amin(-1).clamp(max=0), values.amax(-1).clamp(min=0)
        scales = (high - low) / highest
        zeros = (-low / torch.where(scales > 0, scales, 1)).round().clamp(0, highest)
    scales = torch.where(scales > 0, scales, 1)  # a group of zeros has any
    codes = (values / scales[..., None]).round() + zeros[..., None]
    packed = pack_codes(codes.clamp(0, highest).to(torch.uint8), bits)
    zero_points = pack_codes(zeros.to(torch.uint8), bits)
    return WeightNBits(packed, scales, zero_points, in_features, bits, group_size)


def dequantize_nbits(
    packed: Tensor, scales: Tensor, zero_points: Tensor, in_features: int, bits: int
) -> Tensor:
    """The values of a stored weight, (out, in), in the dtype of its scales; see `WeightNBits`.

    Raises:
        ValueError: there are no codes of so many bits.
    """
    require(bits in BITS, _OP, "bits", "2, 4 or 8", bits)
    rows, groups = scales.shape
    codes = unpack_codes(packed, bits).to(scales.dtype)
    zeros = unpack_codes(zero_points, bits)[:, :groups].to(scales.dtype)
    values = (codes - zeros[..., None]) * scales[..., None]
    return values.reshape(rows, groups * values.shape[-1])[:, :in_features]


def from_gptq(
    tensors: Mapping[str, Tensor],
    name: str,
    bits: int,
    group_size: int,
    *,
    stored_less_one: bool = True,
) -> WeightNBits:
    """A weight from what AutoGPTQ and GPTQModel save of one.

    Args:
        tensors: of a checkpoint: `<name>.qweight`, int32, (in·bits/32, out), `<name>.qzeros`,
            int32, (groups, out·bits/32), `<name>.scales`, (groups, out), and perhaps
            `<name>.g_idx`, (in,), the group that each input is of.
        name: of the layer: `model.layers.0.self_attn.q_proj`.
        bits: of a code.
        group_size: as the configuration says it; -1, or more than `in`, for whole rows.
        stored_less_one: whether one has been taken off all zero points: in all formats but
            `gptq_v2`.

    Raises:
        KeyError: one of these is missing.
        ValueError: their sizes do not fit.
    """
    require(bits in BITS, _OP, "bits", "2, 4 or 8", bits)
    scales = tensors[f"{name}.scales"]
    codes = _columns(_words(tensors, f"{name}.qweight").T, bits)
    words = _words(tensors, f"{name}.qzeros")
    if stored_less_one:  # in whole words, as GPTQModel does: 0 less one has borrowed
        words = words + sum(1 << shift for shift in range(0, _WORD, bits))
    zeros = _columns(words, bits)
    group = tensors.get(f"{name}.g_idx")
    return _ordered(name, codes, zeros.T, scales.T, bits, group_size, group)


def from_awq(
    tensors: Mapping[str, Tensor], name: str, bits: int = 4, group_size: int = 128
) -> WeightNBits:
    """A weight from what AutoAWQ saves of one, in its version `gemm`.

    Args:
        tensors: of a checkpoint: `<name>.qweight`, int32, (in, out·bits/32), `<name>.qzeros`,
            int32, (groups, out·bits/32), `<name>.scales`, (groups, out).
        name: of the layer.
        bits: 4.
        group_size: as the configuration says it; -1, or more than `in`, for whole rows.

    Raises:
        KeyError: one of these is missing.
        ValueError: their sizes do not fit, or codes have other than four bits.
    """
    require(bits == 4, _OP, "bits", "4, of AWQ", bits)
    place = torch.tensor(_AWQ_ORDER).argsort()

    def columns(part: str) -> Tensor:
        found = _columns(_words(tensors, f"{name}.{part}"), bits)
        return found.reshape(-1, found.shape[1] // 8, 8)[..., place].flatten(1).T

    scales = tensors[f"{name}.scales"].T
    return _made(name, columns("qweight"), columns("qzeros"), scales, bits, group_size)


def from_compressed_tensors(
    tensors: Mapping[str, Tensor], name: str, bits: int, group_size: int
) -> WeightNBits:
    """A weight from what compressed-tensors saves of one in its format `pack-quantized`.

    Args:
        tensors: of a checkpoint: `<name>.weight_packed`, int32, (out, ⌈in·bits/32⌉),
            `<name>.weight_scale`, (out, groups), `<name>.weight_shape`, (2,), perhaps
            `<name>.weight_zero_point`, int32, (⌈out·bits/32⌉, groups), without which all are
            2^(bits-1), and perhaps `<name>.weight_g_idx`, (in,), the group that each input is of.
        name: of the layer.
        bits: of a code.
        group_size: as the configuration says it; -1, or more than `in`, for whole rows.

    Raises:
        KeyError: one of these is missing.
        ValueError: their sizes do not fit.
    """
    require(bits in BITS, _OP, "bits", "2, 4 or 8", bits)
    outputs, inputs = (int(size) for size in tensors[f"{name}.weight_shape"].tolist())
    words = _words(tensors, f"{name}.weight_packed")
    size = (outputs, (inputs * bits + _WORD - 1) // _WORD)
    require(words.shape == size, _OP, f"{name}.weight_packed", f"{size}", tuple(words.shape))
    scales = tensors[f"{name}.weight_scale"]
    if f"{name}.weight_zero_point" in tensors:
        zeros = _columns(_words(tensors, f"{name}.weight_zero_point").T, bits)[:, :outputs].T
    else:
        zeros = torch.full(scales.shape, 1 << bits - 1, dtype=torch.uint8)
    codes = _columns(words, bits)[:, :inputs]
    group = tensors.get(f"{name}.weight_g_idx")
    return _ordered(name, codes, zeros, scales, bits, group_size, group)


def _words(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    words = tensors[name]
    require(words.dtype == torch.int32, _OP, name, "int32", dtype_name(words.dtype))
    require(words.dim() == 2, _OP, name, "a matrix", tuple(words.shape))
    return words


def _columns(words: Tensor, bits: int) -> Tensor:
    """The codes of rows of words, the first of each in its lowest bits, as uint8."""
    parts = [(words >> shift & (1 << bits) - 1).to(torch.uint8) for shift in range(0, _WORD, bits)]
    return torch.stack(parts, -1).flatten(1)


def _ordered(
    name: str,
    codes: Tensor,
    zeros: Tensor,
    scales: Tensor,
    bits: int,
    group_size: int,
    group: Tensor | None,
) -> WeightNBits:
    """`_made`, with inputs in the order of groups: `group`, (in,), says which each is of."""
    made = _made(name, codes, zeros, scales, bits, group_size)
    if group is None:
        return made
    inputs = codes.shape[1]
    require(group.shape == (inputs,), _OP, f"{name}.g_idx", f"({inputs},)", tuple(group.shape))
    order = torch.argsort(group.long(), stable=True)
    places = torch.arange(inputs) // made.group_size
    told = f"{made.group_size} inputs for each group, and fewer for the last"
    require(torch.equal(group.long()[order], places), _OP, f"{name}.g_idx", told, "others")
    if torch.equal(order, torch.arange(inputs)):
        return made
    return _made(name, codes[:, order], zeros, scales, bits, group_size, order)


def _made(
    name: str,
    codes: Tensor,
    zeros: Tensor,
    scales: Tensor,
    bits: int,
    group_size: int,
    order: Tensor | None = None,
) -> WeightNBits:
    """From codes (out, in), zero points and scales (out, groups), not packed yet."""
    outputs, inputs = codes.shape
    row = whole_row(inputs)
    group_size = row if group_size == -1 else min(group_size, row)
    require_sizes(_OP, bits, group_size)
    groups = groups_of(inputs, group_size)
    for part, t in (("qzeros", zeros), ("scales", scales)):
        told = f"of {groups} groups and {outputs} outputs"
        require(t.shape == (outputs, groups), _OP, f"{name}.{part}", told, tuple(t.T.shape))
    require(scales.is_floating_point(), _OP, f"{name}.scales", "floating", dtype_name(scales.dtype))
    codes = torch.nn.functional.pad(codes, (0, groups * group_size - inputs))
    packed = pack_codes(codes.reshape(outputs, groups, group_size), bits)
    scales = scales.float().contiguous()
    return WeightNBits(packed, scales, pack_codes(zeros, bits), inputs, bits, group_size, order)
