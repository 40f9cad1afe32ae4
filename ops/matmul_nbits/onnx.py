"""The layer in ONNX: nodes of domain `fuseport.ops`, with function bodies.

Weights stay uint8 in the file. A body makes the whole weight of it, in the dtype of the scales,
where our kernel makes a tile at a time. Bodies are made of standard operators that opset 18 has,
and that onnx's reference evaluator has too.
"""

from collections.abc import Callable
from typing import Any

import torch
from onnx import FunctionProto
from torch import Tensor

from fuseport.ops.onnx_bodies import DOMAIN, LINEAR, LINEAR_BACKWARD, VERSION, parsed

__all__ = ["DOMAIN", "VERSION", "decompositions", "functions"]


def decompositions() -> dict[str, Callable[..., Any]]:
    """For each operator of the op, by name, its form as one symbolic ONNX node."""
    return {"matmul_nbits": _linear, "matmul_nbits_backward": _backward}


def functions(opset: int) -> list[FunctionProto]:
    """The bodies of the nodes, in standard operators of `opset`, 18 or later."""
    return parsed((_FORWARD, _BACKWARD), opset)


def _linear(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    zero_points: Tensor,
    bias: Tensor,
    in_features: int,
    bits: int,
    group_size: int,
) -> Tensor:
    (out,) = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::matmul_nbits",
        (x, packed, scales, zero_points, bias),
        {"in_features": in_features, "bits": bits, "group_size": group_size},
        dtypes=(x.dtype,),
        shapes=((*x.shape[:-1], bias.shape[0]),),
        version=VERSION,
    )
    return out


def _backward(
    dout: Tensor,
    packed: Tensor,
    scales: Tensor,
    zero_points: Tensor,
    in_features: int,
    bits: int,
    group_size: int,
) -> tuple[Tensor, ...]:
    dx, dbias = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::matmul_nbits_backward",
        (dout, packed, scales, zero_points),
        {"in_features": in_features, "bits": bits, "group_size": group_size},
        dtypes=(dout.dtype, dout.dtype),
        shapes=((*dout.shape[:-1], in_features), (dout.shape[-1],)),
        version=VERSION,
    )
    return dx, dbias


_WEIGHT = """
        first = Constant <value_ints = [0]> ()
        unit = Constant <value_ints = [1]> ()
        two = Constant <value_ints = [2]> ()
        last = Constant <value_ints = [-1]> ()
        bits_int = Constant <value_int: int = @bits> ()
        none = Constant <value_int = 0> ()
        eight = Constant <value_int = 8> ()
        shifts_int = Range(none, eight, bits_int)
        shifts = Cast <to = 2> (shifts_int)
        rest_int = Sub(eight, bits_int)
        rest = Cast <to = 2> (rest_int)
        whole_int = Constant <value_int = 255> ()
        whole = Cast <to = 2> (whole_int)
        mask = BitShift <direction = "RIGHT"> (whole, rest)

        in_int = Constant <value_int: int = @in_features> ()
        in_size = Reshape(in_int, last)
        group_int = Constant <value_int: int = @group_size> ()
        group_size_1 = Reshape(group_int, last)
        rows_groups = Shape(scales)
        rows_size = Slice(rows_groups, first, unit)
        groups_size = Slice(rows_groups, unit, two)

        bytes = Unsqueeze(packed, last)
        shifted = BitShift <direction = "RIGHT"> (bytes, shifts)
        parts = BitwiseAnd(shifted, mask)
        in_groups = Concat <axis = 0> (rows_groups, group_size_1)
        codes_byte = Reshape <allowzero = 1> (parts, in_groups)
        codes = CastLike(codes_byte, scales)

        zero_bytes = Unsqueeze(zero_points, last)
        zero_shifted = BitShift <direction = "RIGHT"> (zero_bytes, shifts)
        zero_parts = BitwiseAnd(zero_shifted, mask)
        zero_bytes_shape = Shape(zero_points)
        zero_bytes_size = Slice(zero_bytes_shape, unit, two)
        per_byte = Div(eight, bits_int)
        zero_count = Mul(zero_bytes_size, per_byte)
        zero_shape = Concat <axis = 0> (rows_size, zero_count)
        zero_all = Reshape <allowzero = 1> (zero_parts, zero_shape)
        zero_byte = Slice(zero_all, first, groups_size, unit)
        zero_plain = CastLike(zero_byte, scales)
        zeros = Unsqueeze(zero_plain, last)

        differences = Sub(codes, zeros)
        scales_column = Unsqueeze(scales, last)
        scaled = Mul(differences, scales_column)
        row_length = Mul(groups_size, group_size_1)
        row_shape = Concat <axis = 0> (rows_size, row_length)
        rows_whole = Reshape <allowzero = 1> (scaled, row_shape)
        weight = Slice(rows_whole, first, in_size, unit)
"""
"""packed, scales and zero_points → weight, (out_features, in_features)."""

_FORWARD = (
    """ matmul_nbits <in_features, bits, group_size>
            (x, packed, scales, zero_points, bias) => (out) {"""
    + _WEIGHT
    + LINEAR
    + "    }"
)
_BACKWARD = (
    """ matmul_nbits_backward <in_features, bits, group_size>
            (dout, packed, scales, zero_points) => (dx, dbias) {"""
    + _WEIGHT
    + LINEAR_BACKWARD
    + "    }"
)
