"""The scan and its backward as ONNX: nodes of domain `fuseport.ops`, with function bodies.

A node stands for the whole scan; a runtime that has no kernel for it runs the function body, which
is made of standard operators and recurs over time with `Scan`. The bodies know nothing of dtypes:
the state has A's. They take B and C as (b, G, N, l), of one G; the decompositions bring every other
form to that one. ONNX's arithmetic has no complex numbers: complex A is refused.

Bodies use only what onnx's reference evaluator has too: `Scan` along axis 0, forward in time; time
is reversed with `Slice`.
"""

from collections.abc import Callable
from typing import Any

import torch
from onnx import FunctionProto
from torch import Tensor

from fuseport.ops.onnx_bodies import (
    DOMAIN,
    SILU,
    SILU_SLOPE,
    VERSION,
    parsed,
    softplus,
    softplus_backward,
)
from fuseport.ops.selective_scan import shapes

__all__ = ["DOMAIN", "VERSION", "decompositions", "functions"]


def decompositions() -> dict[str, Callable[..., Any]]:
    """For each operator of the op, by name, its form as one symbolic ONNX node."""
    return {
        "selective_scan": _scan,
        "selective_scan_gated": _scan_gated,
        "selective_scan_backward": _backward,
        "selective_scan_gated_backward": _backward_gated,
    }


def functions(opset: int) -> list[FunctionProto]:
    """The bodies of the nodes, in standard operators of `opset`, 18 or later."""
    texts = [_forward_text(False), _forward_text(True), _backward_text(False), _backward_text(True)]
    return parsed(texts, opset)


def _scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    bias: Tensor,
    softplus: bool,
) -> tuple[Tensor, ...]:
    B, C = _grouped(u, A, B, C)
    return _forward_node("selective_scan", (u, delta, A, B, C, D, bias), softplus)


def _scan_gated(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor,
    bias: Tensor,
    softplus: bool,
) -> tuple[Tensor, ...]:
    B, C = _grouped(u, A, B, C)
    return _forward_node("selective_scan_gated", (u, delta, A, B, C, D, z, bias), softplus)


def _backward(
    dout: Tensor,
    dlast_state: Tensor,
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    bias: Tensor,
    chunk_states: Tensor,
    softplus: bool,
) -> tuple[Tensor, ...]:
    return _backward_node(dout, dlast_state, u, delta, A, B, C, D, None, bias, softplus)


def _backward_gated(
    dout: Tensor,
    dlast_state: Tensor,
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor,
    bias: Tensor,
    chunk_states: Tensor,
    softplus: bool,
) -> tuple[Tensor, ...]:
    return _backward_node(dout, dlast_state, u, delta, A, B, C, D, z, bias, softplus)


def _forward_node(name: str, inputs: tuple[Tensor, ...], softplus: bool) -> tuple[Tensor, ...]:
    u, _, A, *_ = inputs
    b, d, l = u.shape  # noqa: E741
    out, last_state = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::{name}",
        inputs,
        {"delta_softplus": int(softplus)},
        dtypes=(u.dtype, A.dtype),
        shapes=(u.shape, (b, d, A.shape[1])),
        version=VERSION,
    )
    # Only the backward node of torch reads the chunk states; the ONNX one has no use for them.
    chunk_states = A.new_zeros((b, shapes.chunks(l), A.shape[1], d))
    return out, last_state, chunk_states


def _backward_node(
    dout: Tensor,
    dlast_state: Tensor,
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor | None,
    bias: Tensor,
    softplus: bool,
) -> tuple[Tensor, ...]:
    grouped_B, grouped_C = _grouped(u, A, B, C)
    gate = () if z is None else (z,)
    inputs = (dout, dlast_state, u, delta, A, grouped_B, grouped_C, D, *gate, bias)
    # Gradients come in the order of the inputs they belong to, each in its shape and dtype.
    du, ddelta, dA, dB, dC, *rest = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::selective_scan_{'gated_' if gate else ''}backward",
        inputs,
        {"delta_softplus": int(softplus)},
        dtypes=[t.dtype for t in inputs[2:]],
        shapes=[t.shape for t in inputs[2:]],
        version=VERSION,
    )
    return (du, ddelta, dA, _ungrouped(dB, B), _ungrouped(dC, C), *rest)


def _grouped(u: Tensor, A: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    """B and C as (b, G, N, l): of any rank, brought to one G."""
    if A.is_complex():
        raise ValueError("a selective scan with complex A has no form in ONNX")
    b, d, l = u.shape  # noqa: E741

    def four(t: Tensor) -> Tensor:
        if t.dim() == 2:
            return t[None, :, :, None].expand(b, d, t.shape[1], l)
        return t.unsqueeze(1) if t.dim() == 3 else t

    B, C = four(B), four(C)
    if B.shape[1] != C.shape[1]:
        B, C = (t.repeat_interleave(d // t.shape[1], dim=1) for t in (B, C))
    return B, C


def _ungrouped(gradient: Tensor, t: Tensor) -> Tensor:
    """The gradient of `t`, from that of what `_grouped` made of it."""
    if t.dim() == 2:
        return gradient.sum((0, 3))
    groups = t.shape[1] if t.dim() == 4 else 1
    if gradient.shape[1] != groups:
        gradient = gradient.unflatten(1, (groups, -1)).sum(2)
    return gradient.squeeze(1) if t.dim() == 3 else gradient


# In the texts below: b batch, d channels, l length, N states, G groups, c channels of a group.
# Names that end in _t belong to one time step, names that end in _s are sequences with time first.


def _forward_text(gated: bool) -> str:
    name = "selective_scan_gated" if gated else "selective_scan"
    gate = "z, " if gated else ""
    return (
        f"""{name} <delta_softplus>
        (u, delta, A, B, C, D, {gate}delta_bias) => (out, last_state) {{"""
        + _PREPARE
        + """
        last, y_s = Scan <num_scan_inputs = 4, body = step (h, u_t, step_t, B_t, C_t) => (h_t, y_t)
        {"""
        + _STEP
        + """
            read = Mul(h_t, C_t)
            axis_N = Constant <value_ints = [3]> ()
            y_t = ReduceSum(read, axis_N)
        }> (no_state, u_s, step_s, B_s, C_s)"""
        + _OUTPUT
        + (_GATE if gated else "result = Identity(ungated)")
        + """
        out = CastLike(result, u)
        last_shape = Concat <axis = 0> (batch, channels, states)
        last_state = Reshape <allowzero = 1> (last, last_shape)
        }"""
    )


def _backward_text(gated: bool) -> str:
    name = "selective_scan_gated_backward" if gated else "selective_scan_backward"
    z, dz = ("z, ", "dz, ") if gated else ("", "")
    return (
        f"""{name} <delta_softplus>
        (dout, dlast_state, u, delta, A, B, C, D, {z}delta_bias)
        => (du, ddelta, dA, dB, dC, dD, {dz}ddelta_bias) {{"""
        + _PREPARE
        + """
        last, h_s, y_s = Scan <
            num_scan_inputs = 4,
            body = step (h, u_t, step_t, B_t, C_t) => (h_t, h_before, y_t) {"""
        + _STEP
        + """
            h_before = Identity(h)
            read = Mul(h_t, C_t)
            axis_N = Constant <value_ints = [3]> ()
            y_t = ReduceSum(read, axis_N)
        }> (no_state, u_s, step_s, B_s, C_s)
        dout_wide = CastLike(dout, A)"""
        + _OUTPUT
        + (_GATE + _GATE_BACKWARD if gated else "dy = Identity(dout_wide)")
        + _SCAN_BACKWARD
        + "}"
    )


_PREPARE = (
    """
        unit = Constant <value_ints = [1]> ()
        column = Constant <value_ints = [-1, 1]> ()
        axis_3 = Constant <value_ints = [3]> ()
        batch = Shape <start = 0, end = 1> (u)
        channels = Shape <start = 1, end = 2> (u)
        length = Shape <start = 2, end = 3> (u)
        groups = Shape <start = 1, end = 2> (B)
        group_size = Div(channels, groups)
        states = Shape <start = 1, end = 2> (A)
        one_float = Constant <value_float = 1.0> ()
        one = CastLike(one_float, A)

        bias_column = Reshape(delta_bias, column)
        delta_wide = CastLike(delta, A)
        raw = Add(delta_wide, bias_column)
"""
    + softplus("delta_softplus", "step_wide")
    + """
        time_split = Concat <axis = 0> (length, batch, groups, group_size, unit)
        u_wide = CastLike(u, A)
        u_time = Transpose <perm = [2, 0, 1]> (u_wide)
        u_s = Reshape <allowzero = 1> (u_time, time_split)
        step_time = Transpose <perm = [2, 0, 1]> (step_wide)
        step_s = Reshape <allowzero = 1> (step_time, time_split)
        B_wide = CastLike(B, A)
        B_time = Transpose <perm = [3, 0, 1, 2]> (B_wide)
        B_s = Unsqueeze(B_time, axis_3)
        C_wide = CastLike(C, A)
        C_time = Transpose <perm = [3, 0, 1, 2]> (C_wide)
        C_s = Unsqueeze(C_time, axis_3)

        A_split = Concat <axis = 0> (groups, group_size, states)
        A_groups = Reshape(A, A_split)
        A_shape = Shape(A_groups)
        state_shape = Concat <axis = 0> (batch, A_shape)
        zero_float = Constant <value_float = 0.0> ()
        zero = CastLike(zero_float, A)
        no_state = Expand(zero, state_shape)
"""
)
"""Inputs → sequences in A's dtype, (l, b, G, c, 1) and (l, b, G, 1, N); A_groups (G, c, N)."""

_STEP = """
            exponent = Mul(step_t, A_groups)
            decay = Exp(exponent)
            kept = Mul(decay, h)
            inflow = Mul(step_t, u_t)
            added = Mul(inflow, B_t)
            h_t = Add(kept, added)
"""
"""One step of the recurrence, from the state before it, `h`, (b, G, c, N)."""

_OUTPUT = """
        u_shape = Shape(u_time)
        y_time = Reshape <allowzero = 1> (y_s, u_shape)
        y = Transpose <perm = [1, 2, 0]> (y_time)
        D_column = Reshape(D, column)
        skip = Mul(D_column, u_wide)
        ungated = Add(y, skip)
"""

_GATE = f"""
        z_wide = CastLike(z, A)
        {SILU}
        result = Mul(ungated, silu_z)
"""

_GATE_BACKWARD = f"""
        {SILU_SLOPE}
        dsilu = Mul(dout_wide, ungated)
        dz_wide = Mul(dsilu, silu_slope)
        dz = CastLike(dz_wide, z)
        dy = Mul(dout_wide, silu_z)
"""

_SCAN_BACKWARD = (
    """
        dy_time = Transpose <perm = [2, 0, 1]> (dy)
        dy_s = Reshape <allowzero = 1> (dy_time, time_split)
        first = Constant <value_ints = [-1]> ()
        past = Constant <value_ints = [-9223372036854775807]> ()
        axis_0 = Constant <value_ints = [0]> ()
        back = Constant <value_ints = [-1]> ()
        u_r = Slice(u_s, first, past, axis_0, back)
        step_r = Slice(step_s, first, past, axis_0, back)
        B_r = Slice(B_s, first, past, axis_0, back)
        C_r = Slice(C_s, first, past, axis_0, back)
        dy_r = Slice(dy_s, first, past, axis_0, back)
        h_r = Slice(h_s, first, past, axis_0, back)
        dlast = Reshape <allowzero = 1> (dlast_state, state_shape)
        dfirst, dA_sum, du_r, dstep_r, dB_r, dC_r = Scan <
            num_scan_inputs = 6,
            body = step_back (dh_later, dA_later, u_t, step_t, B_t, C_t, dy_t, h)
                => (dh_earlier, dA_t, du_t, dstep_t, dB_t, dC_t) {
            axis_N = Constant <value_ints = [3]> ()
            axis_c = Constant <value_ints = [2]> ()"""
    + _STEP
    + """
            dh_read = Mul(dy_t, C_t)
            dh = Add(dh_later, dh_read)
            dh_earlier = Mul(dh, decay)
            dC_c = Mul(dy_t, h_t)
            dC_t = ReduceSum(dC_c, axis_c)
            dB_c = Mul(dh, inflow)
            dB_t = ReduceSum(dB_c, axis_c)
            dexponent = Mul(dh, kept)
            dA_c = Mul(dexponent, step_t)
            dA_t = Add(dA_later, dA_c)
            dinflow_N = Mul(dh, B_t)
            dinflow = ReduceSum(dinflow_N, axis_N)
            du_t = Mul(dinflow, step_t)
            dstep_inflow = Mul(dinflow, u_t)
            dstep_N = Mul(dexponent, A_groups)
            dstep_decay = ReduceSum(dstep_N, axis_N)
            dstep_t = Add(dstep_inflow, dstep_decay)
        }> (dlast, no_state, u_r, step_r, B_r, C_r, dy_r, h_r)

        du_s = Slice(du_r, first, past, axis_0, back)
        du_time = Reshape <allowzero = 1> (du_s, u_shape)
        du_scan = Transpose <perm = [1, 2, 0]> (du_time)
        du_skip = Mul(D_column, dy)
        du_wide = Add(du_scan, du_skip)
        du = CastLike(du_wide, u)

        sum_axes = Constant <value_ints = [0, 2]> ()
        dD_all = Mul(dy, u_wide)
        dD = ReduceSum <keepdims = 0> (dD_all, sum_axes)

        dA_groups = ReduceSum <keepdims = 0> (dA_sum, axis_0)
        dA_shape = Shape(A)
        dA = Reshape(dA_groups, dA_shape)

        dB_s = Slice(dB_r, first, past, axis_0, back)
        dB_time = Squeeze(dB_s, axis_3)
        dB_wide = Transpose <perm = [1, 2, 3, 0]> (dB_time)
        dB = CastLike(dB_wide, B)
        dC_s = Slice(dC_r, first, past, axis_0, back)
        dC_time = Squeeze(dC_s, axis_3)
        dC_wide = Transpose <perm = [1, 2, 3, 0]> (dC_time)
        dC = CastLike(dC_wide, C)

        dstep_s = Slice(dstep_r, first, past, axis_0, back)
        dstep_time = Reshape <allowzero = 1> (dstep_s, u_shape)
        dstep = Transpose <perm = [1, 2, 0]> (dstep_time)
"""
    + softplus_backward("dstep")
    + """
        ddelta = CastLike(draw, delta)
        ddelta_bias = ReduceSum <keepdims = 0> (draw, sum_axes)
"""
)
