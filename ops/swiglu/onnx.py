"""SwiGLU and its backward as ONNX: nodes of domain `fuseport.ops`, with function bodies.

Bodies use operators that opset 18 has, and that onnx's reference evaluator has too. The attribute
`compute_type` of a node is the type that it computes in: 1 for float32, 11 for float64. Opset
28 has an operator of its own, `SwiGLU`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from onnx import FunctionProto
from torch import Tensor

from fuseport.ops.onnx_bodies import DOMAIN, VERSION, parsed
from fuseport.ops.swiglu.shapes import half_shape

__all__ = ["DOMAIN", "VERSION", "decompositions", "functions"]


def decompositions() -> dict[str, Callable[..., Any]]:
    """For each operator of the op, by name, its form as one symbolic ONNX node."""
    return {
        "swiglu": _swiglu,
        "swiglu_backward": _backward,
        "swiglu_packed": _packed,
        "swiglu_packed_backward": _packed_backward,
    }


def functions(opset: int) -> list[FunctionProto]:
    """The bodies of the nodes, in standard operators of `opset`, 18 or later."""
    texts = (_FORWARD, _BACKWARD, _PACKED, _PACKED_BACKWARD)
    return parsed(texts, opset)


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return _node("swiglu", (gate, up), [gate.shape])[0]


def _backward(dout: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    dgate, dup = _node("swiglu_backward", (dout, gate, up), [gate.shape, up.shape])
    return dgate, dup


def _packed(x: Tensor) -> Tensor:
    return _node("swiglu_packed", (x,), [half_shape(x)])[0]


def _packed_backward(dout: Tensor, x: Tensor) -> Tensor:
    return _node("swiglu_packed_backward", (dout, x), [x.shape])[0]


def _node(
    name: str, inputs: tuple[Tensor, ...], shapes: Sequence[tuple[int, ...]]
) -> Sequence[Tensor]:
    dtype = inputs[0].dtype
    return torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::{name}",
        inputs,
        {"compute_type": 11 if dtype == torch.float64 else 1},
        dtypes=[dtype] * len(shapes),
        shapes=shapes,
        version=VERSION,
    )


_SIGMOID = """
        g = Cast <to: int = @compute_type> (gate)
        u = Cast <to: int = @compute_type> (up)
        one_float = Constant <value_float = 1.0> ()
        one = CastLike(one_float, g)
        minus_g = Neg(g)
        exp_minus_g = Exp(minus_g)
        divisor = Add(one, exp_minus_g)
        sigmoid = Div(one, divisor)
        silu = Mul(g, sigmoid)
"""
"""Of Exp alone, since Sigmoid is computed to an absolute accuracy in some runtimes."""

_OUT = """
        product = Mul(silu, u)
        out = CastLike(product, gate)
"""

_GRADIENTS = """
        dy = Cast <to: int = @compute_type> (dout)
        one_less = Sub(one, sigmoid)
        g_one_less = Mul(g, one_less)
        bent = Add(one, g_one_less)
        slope = Mul(sigmoid, bent)
        dsilu = Mul(dy, u)
        dgate_wide = Mul(dsilu, slope)
        dgate = CastLike(dgate_wide, gate)
        dup_wide = Mul(dy, silu)
        dup = CastLike(dup_wide, up)
"""

_HALVES = " gate, up = Split <axis = -1, num_outputs = 2> (x) "

_FORWARD = f" swiglu <compute_type> (gate, up) => (out) {{ {_SIGMOID} {_OUT} }}"
_BACKWARD = f""" swiglu_backward <compute_type> (dout, gate, up) => (dgate, dup) {{
    {_SIGMOID} {_GRADIENTS} }}"""
_PACKED = f" swiglu_packed <compute_type> (x) => (out) {{ {_HALVES} {_SIGMOID} {_OUT} }}"
_PACKED_BACKWARD = f""" swiglu_packed_backward <compute_type> (dout, x) => (dx) {{
    {_HALVES} {_SIGMOID} {_GRADIENTS} dx = Concat <axis = -1> (dgate, dup) }}"""
