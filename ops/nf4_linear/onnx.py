"""The layer and its backward as ONNX: nodes of domain `fuseport.ops`, with function bodies.

Weights stay uint8 in the file. A body makes the whole weight of it, in absmax's dtype, where our
kernel makes a tile at a time. Bodies are made of standard operators that opset 18 has, and that
onnx's reference evaluator has too. The LoRA adapters are plain products around the node.
"""

from collections.abc import Callable
from typing import Any

import torch
from onnx import FunctionProto
from torch import Tensor

from fuseport.ops.nf4_linear.storage import CODES, QUANT_TYPES
from fuseport.ops.onnx_bodies import DOMAIN, LINEAR, LINEAR_BACKWARD, VERSION, parsed

__all__ = ["DOMAIN", "VERSION", "decompositions", "functions"]


def decompositions() -> dict[str, Callable[..., Any]]:
    """For each operator of the op, by name, its form as one symbolic ONNX node."""
    return {"nf4_linear": _linear, "nf4_linear_backward": _backward}


def functions(opset: int) -> list[FunctionProto]:
    """The bodies of the nodes, in standard operators of `opset`, 18 or later."""
    return parsed((_FORWARD, _BACKWARD), opset)


def _linear(
    x: Tensor,
    packed: Tensor,
    absmax: Tensor,
    bias: Tensor,
    in_features: int,
    block_size: int,
    quant_type: int = 1,
) -> Tensor:
    (out,) = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::nf4_linear",
        (x, packed, absmax, bias),
        {"in_features": in_features, "block_size": block_size, "quant_type": quant_type},
        dtypes=(x.dtype,),
        shapes=((*x.shape[:-1], bias.shape[0]),),
        version=VERSION,
    )
    return out


def _backward(
    dout: Tensor,
    packed: Tensor,
    absmax: Tensor,
    in_features: int,
    block_size: int,
    quant_type: int = 1,
) -> tuple[Tensor, ...]:
    dx, dbias = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::nf4_linear_backward",
        (dout, packed, absmax),
        {"in_features": in_features, "block_size": block_size, "quant_type": quant_type},
        dtypes=(dout.dtype, dout.dtype),
        shapes=((*dout.shape[:-1], in_features), (dout.shape[-1],)),
        version=VERSION,
    )
    return dx, dbias


_CODES = ", ".join(str(value) for quant_type in QUANT_TYPES for value in CODES[quant_type])

_WEIGHT = f"""
        codes = Constant <value = float[{len(QUANT_TYPES)}, 16] {{{_CODES}}}> ()
        which = Constant <value_int: int = @quant_type> ()
        code_float = Gather(codes, which)
        code = CastLike(code_float, absmax)
        column = Constant <value_ints = [-1, 1]> ()
        flat = Constant <value_ints = [-1]> ()
        four_int = Constant <value_int = 4> ()
        four = Cast <to = 2> (four_int)
        high_byte = BitShift <direction = "RIGHT"> (packed, four)
        shifted_back = BitShift <direction = "LEFT"> (high_byte, four)
        low_byte = Sub(packed, shifted_back)
        high = Reshape(high_byte, column)
        low = Reshape(low_byte, column)
        pairs = Concat <axis = 1> (high, low)
        every_index_byte = Reshape(pairs, flat)

        in_int = Constant <value_int: int = @in_features> ()
        in_size = Reshape(in_int, flat)
        sizes = Concat <axis = 0> (out_size, in_size)
        count = Mul(out_size, in_size)
        block_int = Constant <value_int: int = @block_size> ()
        block = Reshape(block_int, flat)
        first = Constant <value_ints = [0]> ()
        index_byte = Slice(every_index_byte, first, count)
        index = Cast <to = 6> (index_byte)
        values = Gather(code, index)
        absmax_column = Reshape(absmax, column)
        blocks = Shape(absmax)
        scale_shape = Concat <axis = 0> (blocks, block)
        scales_block = Expand(absmax_column, scale_shape)
        scales_flat = Reshape(scales_block, flat)
        scales = Slice(scales_flat, first, count)
        scaled = Mul(values, scales)
        weight = Reshape(scaled, sizes)
"""
"""packed, absmax and out_size, (1,), → weight, (out_features, in_features)."""

_FORWARD = (
    """ nf4_linear <in_features, block_size, quant_type> (x, packed, absmax, bias) => (out) {
        out_size = Shape(bias)"""
    + _WEIGHT
    + LINEAR
    + "    }"
)
_BACKWARD = (
    """ nf4_linear_backward <in_features, block_size, quant_type>
            (dout, packed, absmax) => (dx, dbias) {
        out_size = Shape <start = -1> (dout)"""
    + _WEIGHT
    + LINEAR_BACKWARD
    + "    }"
)
