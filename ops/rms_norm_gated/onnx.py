"""The gated norm and its backward as ONNX: nodes of domain `fuseport.ops`, with function bodies.

The body has one form for both orders: v = x·before and out = norm(v)·weight·after, of which one
factor is SiLU(z) and the other 1. `rms_norm.onnx` says how nodes take weight and eps.
"""

from collections.abc import Callable
from typing import Any

from onnx import FunctionProto
from torch import Tensor

from fuseport.ops.onnx_bodies import DOMAIN, SILU, SILU_SLOPE, VERSION, parsed
from fuseport.ops.rms_norm.onnx import (
    EPS,
    NORM,
    NORM_BACKWARD,
    attributes,
    backward_node,
    forward_node,
)

__all__ = ["DOMAIN", "VERSION", "decompositions", "functions"]


def decompositions() -> dict[str, Callable[..., Any]]:
    """For each operator of the op, by name, its form as one symbolic ONNX node."""
    return {"rms_norm_gated": _norm, "rms_norm_gated_backward": _backward}


def functions(opset: int) -> list[FunctionProto]:
    """The bodies of the nodes, in standard operators of `opset`, 18 or later."""
    return parsed((_FORWARD, _BACKWARD), opset)


def _norm(
    x: Tensor, z: Tensor, weight: Tensor, eps: float, group_size: int, norm_before_gate: bool
) -> tuple[Tensor, ...]:
    given = {**attributes(eps, group_size), "norm_before_gate": int(norm_before_gate)}
    return forward_node("rms_norm_gated", (x, z, weight), given)


def _backward(
    dout: Tensor,
    x: Tensor,
    z: Tensor,
    weight: Tensor,
    rstd: Tensor,
    eps: float,
    group_size: int,
    norm_before_gate: bool,
) -> tuple[Tensor, ...]:
    given = {**attributes(eps, group_size), "norm_before_gate": int(norm_before_gate)}
    return backward_node("rms_norm_gated_backward", (dout, x, z, weight), given)


_GATE = (
    """
        x_wide = CastLike(x, weight)
        z_wide = CastLike(z, weight)
        one_float = Constant <value_float = 1.0> ()
        one = CastLike(one_float, weight)
"""
    + SILU
    + """
        flag = Constant <value_int: int = @norm_before_gate> ()
        norm_first = Cast <to = 9> (flag)
        before = Where(norm_first, one, silu_z)
        after = Where(norm_first, silu_z, one)
        v = Mul(x_wide, before)
"""
)
"""x, z → v, and the factors before and after the norm."""

_FORWARD = (
    """ rms_norm_gated <eps_mantissa, eps_exponent, group_size, norm_before_gate>
    (x, z, weight) => (out) {"""
    + EPS
    + _GATE
    + NORM
    + """
        scaled = Mul(n, weight)
        result = Mul(scaled, after)
        out = CastLike(result, x)
    }"""
)
_BACKWARD = (
    """ rms_norm_gated_backward <eps_mantissa, eps_exponent, group_size, norm_before_gate>
    (dout, x, z, weight) => (dx, dz, dweight) {"""
    + EPS
    + _GATE
    + NORM
    + """
        dy = CastLike(dout, weight)
        dn = Mul(dy, after)
    """
    + NORM_BACKWARD
    + """
        dx_wide = Mul(dv, before)
        dx = CastLike(dx_wide, x)
        scaled = Mul(n, weight)
        dsilu_after = Mul(dy, scaled)
        dsilu_before = Mul(dv, x_wide)
        dsilu = Where(norm_first, dsilu_after, dsilu_before)
"""
    + SILU_SLOPE
    + """
        dz_wide = Mul(dsilu, silu_slope)
        dz = CastLike(dz_wide, z)
    }"""
)
