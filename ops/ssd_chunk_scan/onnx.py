"""The chunked scan and its backward as ONNX: nodes of domain `fuseport.ops`, with function bodies.

The bodies follow the definition, step by step, with `Scan`; they know nothing of dtypes and compute
in D's. They use only what onnx's reference evaluator has too: `Scan` along axis 0, forward in time;
time is reversed with `Slice`.
"""

from collections.abc import Callable, Sequence
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

__all__ = ["DOMAIN", "VERSION", "decompositions", "functions"]


def decompositions() -> dict[str, Callable[..., Any]]:
    """For each operator of the op, by name, its form as one symbolic ONNX node."""

    def forward(name: str) -> Callable[..., Any]:
        return lambda *inputs: _forward_node(name, inputs)

    def backward(name: str) -> Callable[..., Any]:
        return lambda *inputs: _backward_node(name, inputs)

    return {
        "ssd_chunk_scan": forward("ssd_chunk_scan"),
        "ssd_chunk_scan_gated": forward("ssd_chunk_scan_gated"),
        "ssd_chunk_scan_backward": backward("ssd_chunk_scan_backward"),
        "ssd_chunk_scan_gated_backward": backward("ssd_chunk_scan_gated_backward"),
        "ssd_chunk_scan_discrete": _discrete_node,
        "ssd_chunk_scan_discrete_backward": _discrete_backward_node,
    }


def functions(opset: int) -> list[FunctionProto]:
    """The bodies of the nodes, in standard operators of `opset`, 18 or later."""
    texts = [text(kind) for text in (_forward_text, _backward_text) for kind in _KINDS]
    return parsed(texts, opset)


def _node(
    name: str, tensors: Sequence[Tensor], like: Sequence[Tensor], **attributes: bool
) -> tuple[Tensor, ...]:
    results = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::{name}",
        tensors,
        {attribute: int(value) for attribute, value in attributes.items()},
        dtypes=[t.dtype for t in like],
        shapes=[t.shape for t in like],
        version=VERSION,
    )
    return tuple(results)


def _forward_node(name: str, inputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
    *tensors, softplus = inputs
    x, initial_states = tensors[0], tensors[-3]
    return _node(name, tensors, [x, initial_states], dt_softplus=softplus)


def _backward_node(name: str, inputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
    *tensors, softplus = inputs
    # Gradients come in the order of the inputs they belong to; seq_idx and dt_limit have none.
    return _node(name, tensors, tensors[2:-2], dt_softplus=softplus)


def _discrete_node(*tensors: Tensor) -> tuple[Tensor, ...]:
    x, initial_states = tensors[0], tensors[-2]
    return _node("ssd_chunk_scan_discrete", tensors, [x, initial_states])


def _discrete_backward_node(*tensors: Tensor) -> tuple[Tensor, ...]:
    return _node("ssd_chunk_scan_discrete_backward", tensors, tensors[2:-1])


# In the texts below: b batch, l length, H heads, P their width, G groups, c heads of a group, N
# states. Names that end in _t belong to one time step, names that end in _s are sequences with time
# first.


_KINDS = ("", "_gated", "_discrete")
_REST = "dt_bias, initial_states, seq_idx, dt_limit"
_INPUTS = {
    "": f"x, dt, A, B, C, D, {_REST}",
    "_gated": f"x, dt, A, B, C, D, z, {_REST}",
    "_discrete": "x, log_decay, B, C, D, initial_states, seq_idx",
}
_GRADIENTS = {
    "": "dx, ddt, dA, dB, dC, dD, ddt_bias, dinitial_states",
    "_gated": "dx, ddt, dA, dB, dC, dD, dz, ddt_bias, dinitial_states",
    "_discrete": "dx, dlog_decay, dB, dC, dD, dinitial_states",
}
_ATTRIBUTES = {"": "<dt_softplus>", "_gated": "<dt_softplus>", "_discrete": ""}


def _forward_text(kind: str) -> str:
    return (
        f"""ssd_chunk_scan{kind} {_ATTRIBUTES[kind]} ({_INPUTS[kind]}) => (out, final_states) {{"""
        + _prepare(kind)
        + """
        last, y_s = Scan <num_scan_inputs = 5,
            body = step (h, x_t, step_t, B_t, C_t, same_t) => (h_t, y_t) {"""
        + _step(kind)
        + """
            read = Mul(h_t, C_t)
            axis_N = Constant <value_ints = [4]> ()
            y_t = ReduceSum(read, axis_N)
        }> (initial, x_s, step_s, B_s, C_s, same_s)"""
        + _OUTPUT
        + (_GATE if kind == "_gated" else "result = Identity(ungated)")
        + """
        out = CastLike(result, x)
        states_shape = Shape(initial_states)
        final_states = Reshape <allowzero = 1> (last, states_shape)
        }"""
    )


def _backward_text(kind: str) -> str:
    return (
        f"""ssd_chunk_scan{kind}_backward {_ATTRIBUTES[kind]}
        (dout, dfinal_states, {_INPUTS[kind]}) => ({_GRADIENTS[kind]}) {{"""
        + _prepare(kind)
        + """
        last, h_s, y_s = Scan <
            num_scan_inputs = 5,
            body = step (h, x_t, step_t, B_t, C_t, same_t) => (h_t, h_before, y_t) {"""
        + _step(kind)
        + """
            h_before = Identity(h)
            read = Mul(h_t, C_t)
            axis_N = Constant <value_ints = [4]> ()
            y_t = ReduceSum(read, axis_N)
        }> (initial, x_s, step_s, B_s, C_s, same_s)
        dout_wide = CastLike(dout, D)"""
        + _OUTPUT
        + (_GATE + _GATE_BACKWARD if kind == "_gated" else "dy = Identity(dout_wide)")
        + _scan_backward(kind)
        + (_LOG_DECAY_BACKWARD if kind == "_discrete" else _STEPS_BACKWARD)
        + """
        states_shape = Shape(initial_states)
        dinitial_states = Reshape(dfirst, states_shape)
        }"""
    )


# As sequences x is (l, b, G, c, P, 1), the steps are (l, b, G, c, 1, 1), B and C (l, b, G, 1, 1,
# N); A is (G, c, 1, 1). same_s, (l, b, 1, 1, 1, 1), says whether a step is of the sequence of that
# before. Of the discrete scan step_s are the logarithms of decays.
def _prepare(kind: str) -> str:
    given = "step_wide = Identity(log_decay)" if kind == "_discrete" else _STEPS
    return _SIZES + given + _SEQUENCES


_SIZES = """
        unit = Constant <value_ints = [1]> ()
        batch = Shape <start = 0, end = 1> (x)
        length = Shape <start = 1, end = 2> (x)
        units_2 = Constant <value_ints = [1, 1]> ()
        axis_0 = Constant <value_ints = [0]> ()
        one_end = Constant <value_ints = [1]> ()
        two_end = Constant <value_ints = [2]> ()
        heads = Shape <start = 2, end = 3> (x)
        width = Shape <start = 3, end = 4> (x)
        groups = Shape <start = 2, end = 3> (B)
        group_size = Div(heads, groups)
        states = Shape <start = 3, end = 4> (B)
        one_float = Constant <value_float = 1.0> ()
        one = CastLike(one_float, D)
        zero = Sub(one, one)
"""

_STEPS = (
    """
        dt_wide = CastLike(dt, D)
        raw = Add(dt_wide, dt_bias)
"""
    + softplus("dt_softplus", "smooth")
    + """
        lowest = Slice(dt_limit, axis_0, one_end, axis_0)
        highest = Slice(dt_limit, one_end, two_end, axis_0)
        not_below = Max(smooth, lowest)
        step_wide = Min(not_below, highest)
        A_split = Concat <axis = 0> (groups, group_size, units_2)
        A_groups = Reshape(A, A_split)
"""
)

_SEQUENCES = """
        x_split = Concat <axis = 0> (length, batch, groups, group_size, width, unit)
        step_split = Concat <axis = 0> (length, batch, groups, group_size, units_2)
        coefficient_split = Concat <axis = 0> (length, batch, groups, units_2, states)
        state_split = Concat <axis = 0> (batch, groups, group_size, width, states)
        x_wide = CastLike(x, D)
        x_time = Transpose <perm = [1, 0, 2, 3]> (x_wide)
        x_s = Reshape <allowzero = 1> (x_time, x_split)
        step_time = Transpose <perm = [1, 0, 2]> (step_wide)
        step_s = Reshape <allowzero = 1> (step_time, step_split)
        B_wide = CastLike(B, D)
        B_time = Transpose <perm = [1, 0, 2, 3]> (B_wide)
        B_s = Reshape <allowzero = 1> (B_time, coefficient_split)
        C_wide = CastLike(C, D)
        C_time = Transpose <perm = [1, 0, 2, 3]> (C_wide)
        C_s = Reshape <allowzero = 1> (C_time, coefficient_split)
        initial = Reshape <allowzero = 1> (initial_states, state_split)

        axis_1 = Constant <value_ints = [1]> ()
        but_last = Constant <value_ints = [-1]> ()
        seq_first = Slice(seq_idx, axis_0, one_end, axis_1)
        seq_earlier = Slice(seq_idx, axis_0, but_last, axis_1)
        seq_before = Concat <axis = 1> (seq_first, seq_earlier)
        same = Equal(seq_idx, seq_before)
        same_time = Transpose <perm = [1, 0]> (same)
        same_split = Concat <axis = 0> (length, batch, units_2, units_2)
        same_s = Reshape <allowzero = 1> (same_time, same_split)
"""


def _step(kind: str) -> str:
    """One step of the recurrence, from the state before it, `h`, (b, G, c, P, N)."""
    return (_AS_GIVEN if kind == "_discrete" else _BY_STEP) + _STEP


_AS_GIVEN = """
            exponent = Identity(step_t)
            inflow = Identity(x_t)
"""
_BY_STEP = """
            exponent = Mul(step_t, A_groups)
            inflow = Mul(step_t, x_t)
"""
_STEP = """
            decay_same = Exp(exponent)
            decay = Where(same_t, decay_same, zero)
            kept = Mul(decay, h)
            added = Mul(inflow, B_t)
            h_t = Add(kept, added)
"""

_OUTPUT = """
        x_shape = Shape(x_time)
        y_time = Reshape <allowzero = 1> (y_s, x_shape)
        y = Transpose <perm = [1, 0, 2, 3]> (y_time)
        skip = Mul(D, x_wide)
        ungated = Add(y, skip)
"""

_GATE = f"""
        z_wide = CastLike(z, D)
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


def _scan_backward(kind: str) -> str:
    discrete = kind == "_discrete"
    results, each = ("", "") if discrete else ("dA_r, ", "dA_t, ")
    return f"""
        dy_time = Transpose <perm = [1, 0, 2, 3]> (dy)
        dy_s = Reshape <allowzero = 1> (dy_time, x_split)
        first = Constant <value_ints = [-1]> ()
        past = Constant <value_ints = [-9223372036854775807]> ()
        back = Constant <value_ints = [-1]> ()
        x_r = Slice(x_s, first, past, axis_0, back)
        step_r = Slice(step_s, first, past, axis_0, back)
        B_r = Slice(B_s, first, past, axis_0, back)
        C_r = Slice(C_s, first, past, axis_0, back)
        dy_r = Slice(dy_s, first, past, axis_0, back)
        h_r = Slice(h_s, first, past, axis_0, back)
        dlast = Reshape <allowzero = 1> (dfinal_states, state_split)
        same_r = Slice(same_s, first, past, axis_0, back)
        dfirst, dx_r, dstep_r, {results}dB_r, dC_r = Scan <
            num_scan_inputs = 7,
            body = step_back (dh_later, x_t, step_t, B_t, C_t, same_t, dy_t, h)
                => (dh_earlier, dx_t, dstep_t, {each}dB_t, dC_t) {{
            axis_N = Constant <value_ints = [4]> ()
            axis_P = Constant <value_ints = [3]> ()
            axes_PN = Constant <value_ints = [3, 4]> ()
            axes_cP = Constant <value_ints = [2, 3]> ()
            {_step(kind)}
            dh_read = Mul(dy_t, C_t)
            dh = Add(dh_later, dh_read)
            dh_earlier = Mul(dh, decay)
            dC_heads = Mul(dy_t, h_t)
            dC_t = ReduceSum(dC_heads, axes_cP)
            dB_heads = Mul(dh, inflow)
            dB_t = ReduceSum(dB_heads, axes_cP)
            dexponents = Mul(dh, kept)
            dexponent = ReduceSum(dexponents, axes_PN)
            dinflow_N = Mul(dh, B_t)
            dinflow = ReduceSum(dinflow_N, axis_N)
            {_AS_GIVEN_BACKWARD if discrete else _BY_STEP_BACKWARD}
        }}> (dlast, x_r, step_r, B_r, C_r, same_r, dy_r, h_r)

        dx_s = Slice(dx_r, first, past, axis_0, back)
        dx_time = Reshape <allowzero = 1> (dx_s, x_shape)
        dx_scan = Transpose <perm = [1, 0, 2, 3]> (dx_time)
        dx_skip = Mul(D, dy)
        dx_wide = Add(dx_scan, dx_skip)
        dx = CastLike(dx_wide, x)

        sum_axes = Constant <value_ints = [0, 1]> ()
        dD_all = Mul(dy, x_wide)
        dD = ReduceSum <keepdims = 0> (dD_all, sum_axes)

        coefficient_shape = Shape(B_time)
        dB_s = Slice(dB_r, first, past, axis_0, back)
        dB_time = Reshape <allowzero = 1> (dB_s, coefficient_shape)
        dB_wide = Transpose <perm = [1, 0, 2, 3]> (dB_time)
        dB = CastLike(dB_wide, B)
        dC_s = Slice(dC_r, first, past, axis_0, back)
        dC_time = Reshape <allowzero = 1> (dC_s, coefficient_shape)
        dC_wide = Transpose <perm = [1, 0, 2, 3]> (dC_time)
        dC = CastLike(dC_wide, C)

        step_shape = Shape(step_time)
        dstep_s = Slice(dstep_r, first, past, axis_0, back)
        dstep_time = Reshape <allowzero = 1> (dstep_s, step_shape)
        dstep = Transpose <perm = [1, 0, 2]> (dstep_time)
"""


_AS_GIVEN_BACKWARD = """
            dx_t = Identity(dinflow)
            dstep_t = Identity(dexponent)
"""
_BY_STEP_BACKWARD = """
            dA_t = Mul(dexponent, step_t)
            dx_t = Mul(dinflow, step_t)
            dstep_P = Mul(dinflow, x_t)
            dstep_inflow = ReduceSum(dstep_P, axis_P)
            dstep_decay = Mul(dexponent, A_groups)
            dstep_t = Add(dstep_inflow, dstep_decay)
"""

_LOG_DECAY_BACKWARD = """
        dlog_decay = Identity(dstep)
"""
_STEPS_BACKWARD = (
    """
        dA_groups = ReduceSum <keepdims = 0> (dA_r, sum_axes)
        dA = Reshape(dA_groups, heads)
        not_low = GreaterOrEqual(smooth, lowest)
        not_high = LessOrEqual(smooth, highest)
        free = And(not_low, not_high)
        dsmooth = Where(free, dstep, zero)
"""
    + softplus_backward("dsmooth")
    + """
        ddt = CastLike(draw, dt)
        ddt_bias = ReduceSum <keepdims = 0> (draw, sum_axes)
"""
)
