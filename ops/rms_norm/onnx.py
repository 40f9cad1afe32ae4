"""The norm and its backward as ONNX: nodes of domain `fuseport.ops`, with function bodies.

A node takes weight in the dtype of computation; the decompositions bring every other to that. eps
is eps_mantissa·2^eps_exponent, since an attribute that is a float would round it to float32.

Bodies are made of standard operators that opset 18 has, and that onnx's reference evaluator has
too. From opset 23 on, `RMSNormalization` would be the node itself where a group is all of a row:
`RMSNormalization <axis = -1, epsilon, stash_type>` (x, weight), if eps is a float32.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from onnx import FunctionProto
from torch import Tensor

from fuseport.ops.onnx_bodies import DOMAIN, VERSION, parsed
from fuseport.ops.rms_norm.shapes import wide

__all__ = [
    "DOMAIN",
    "EPS",
    "NORM",
    "NORM_BACKWARD",
    "VERSION",
    "attributes",
    "backward_node",
    "decompositions",
    "forward_node",
    "functions",
]


def decompositions() -> dict[str, Callable[..., Any]]:
    """For each operator of the op, by name, its form as one symbolic ONNX node."""
    return {"rms_norm": _norm, "rms_norm_backward": _backward}


def functions(opset: int) -> list[FunctionProto]:
    """The bodies of the nodes, in standard operators of `opset`, 18 or later."""
    return parsed((_FORWARD, _BACKWARD), opset)


def attributes(eps: float, group_size: int) -> dict[str, int]:
    """Of a node."""
    mantissa, exponent = math.frexp(eps)
    return {
        "eps_mantissa": int(mantissa * 2**53),
        "eps_exponent": exponent - 53,
        "group_size": group_size,
    }


def forward_node(
    name: str, inputs: tuple[Tensor, ...], given: dict[str, int]
) -> tuple[Tensor, Tensor]:
    """out and rstd, by a node whose inputs are x, others of its shape, and weight."""
    x, *rest, weight = inputs
    (out,) = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::{name}",
        (x, *rest, weight.to(wide(x.dtype))),
        {**given},  # a dict is invariant
        dtypes=(x.dtype,),
        shapes=(x.shape,),
        version=VERSION,
    )
    # Only the backward node of torch reads rstd; the ONNX one has no use for it.
    groups = (*x.shape[:-1], x.shape[-1] // given["group_size"])
    return out, x.new_zeros(groups, dtype=wide(x.dtype))


def backward_node(
    name: str, inputs: tuple[Tensor, ...], given: dict[str, int]
) -> tuple[Tensor, ...]:
    """Gradients of all inputs but the first, in their order, by a node whose first is dout."""
    dout, *rest, weight = inputs
    widened = weight.to(wide(dout.dtype))
    *gradients, dweight = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::{name}",
        (dout, *rest, widened),
        {**given},  # a dict is invariant
        dtypes=[*(t.dtype for t in rest), widened.dtype],
        shapes=[*(t.shape for t in rest), weight.shape],
        version=VERSION,
    )
    return (*gradients, dweight.to(weight.dtype))


def _norm(x: Tensor, weight: Tensor, eps: float, group_size: int) -> tuple[Tensor, ...]:
    return forward_node("rms_norm", (x, weight), attributes(eps, group_size))


def _backward(
    dout: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, eps: float, group_size: int
) -> tuple[Tensor, ...]:
    given = attributes(eps, group_size)
    return backward_node("rms_norm_backward", (dout, x, weight), given)


EPS = """
        mantissa_int = Constant <value_int: int = @eps_mantissa> ()
        mantissa = Cast <to = 11> (mantissa_int)
        exponent_int = Constant <value_int: int = @eps_exponent> ()
        exponent = Cast <to = 11> (exponent_int)
        two_float = Constant <value_float = 2.0> ()
        two = Cast <to = 11> (two_float)
        power = Pow(two, exponent)
        eps_double = Mul(mantissa, power)
        eps = CastLike(eps_double, weight)
"""

NORM = """
        axis = Constant <value_ints = [-1]> ()
        group_int = Constant <value_int: int = @group_size> ()
        group = Reshape(group_int, axis)
        rows = Shape <start = 0, end = -1> (v)
        whole = Shape(v)
        channels = Shape <start = -1> (v)
        groups = Div(channels, group)
        split = Concat <axis = 0> (rows, groups, group)
        v_groups = Reshape <allowzero = 1> (v, split)
        squares = Mul(v_groups, v_groups)
        mean = ReduceMean <keepdims = 1> (squares, axis)
        mean_eps = Add(mean, eps)
        root = Sqrt(mean_eps)
        n_groups = Div(v_groups, root)
        n = Reshape <allowzero = 1> (n_groups, whole)
"""
"""v → n, and n_groups and root, (…, groups, group_size) and (…, groups, 1)."""

NORM_BACKWARD = """
        g = Mul(dn, weight)
        g_groups = Reshape <allowzero = 1> (g, split)
        product = Mul(g_groups, n_groups)
        mean_product = ReduceMean <keepdims = 1> (product, axis)
        shared = Mul(n_groups, mean_product)
        difference = Sub(g_groups, shared)
        dv_groups = Div(difference, root)
        dv = Reshape <allowzero = 1> (dv_groups, whole)

        dweight_rows = Mul(dn, n)
        first = Constant <value_ints = [0]> ()
        row_count = ReduceProd <keepdims = 1> (rows, first)
        matrix = Concat <axis = 0> (row_count, channels)
        dweight_matrix = Reshape <allowzero = 1> (dweight_rows, matrix)
        dweight = ReduceSum <keepdims = 0> (dweight_matrix, first)
"""
"""dn, the cotangent of n·weight, → dv and dweight."""

_FORWARD = (
    """ rms_norm <eps_mantissa, eps_exponent, group_size> (x, weight) => (out) {"""
    + EPS
    + "v = CastLike(x, weight)"
    + NORM
    + """
        result = Mul(n, weight)
        out = CastLike(result, x)
    }"""
)
_BACKWARD = (
    """ rms_norm_backward <eps_mantissa, eps_exponent, group_size>
    (dout, x, weight) => (dx, dweight) {"""
    + EPS
    + "v = CastLike(x, weight)"
    + NORM
    + "dn = CastLike(dout, weight)"
    + NORM_BACKWARD
    + """
        dx = CastLike(dv, x)
    }"""
)
