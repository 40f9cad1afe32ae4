"""The gated delta rule and its backward as ONNX: nodes of domain `fuseport.ops`, with bodies.

The bodies follow the definition, step by step, with `Scan`; they know nothing of dtypes and compute
in g's. They use only what onnx's reference evaluator has too: `Scan` along axis 0, forward in time;
time is reversed with `Slice`.
"""

from collections.abc import Callable
from typing import Any

import torch
from onnx import FunctionProto
from torch import Tensor

from fuseport.ops.onnx_bodies import DOMAIN, VERSION, exact_scale, parsed, scale_attributes

__all__ = ["DOMAIN", "VERSION", "decompositions", "functions"]


def decompositions() -> dict[str, Callable[..., Any]]:
    """For each operator of the op, by name, its form as one symbolic ONNX node."""
    return {"gated_delta_rule": _rule, "gated_delta_rule_backward": _rule_backward}


def functions(opset: int) -> list[FunctionProto]:
    """The bodies of the nodes, in standard operators of `opset`, 18 or later."""
    return parsed((_FORWARD, _BACKWARD), opset)


def _rule(*inputs: Any) -> tuple[Tensor, ...]:
    *tensors, scale = inputs
    return _node("gated_delta_rule", tensors, scale, [tensors[2], tensors[5]])


def _rule_backward(*inputs: Any) -> tuple[Tensor, ...]:
    *tensors, scale = inputs
    # Gradients come in the order of the inputs they belong to.
    return _node("gated_delta_rule_backward", tensors, scale, tensors[2:])


def _node(name: str, tensors: list[Tensor], scale: float, like: list[Tensor]) -> tuple[Tensor, ...]:
    results = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::{name}",
        tensors,
        scale_attributes(scale),
        dtypes=[t.dtype for t in like],
        shapes=[t.shape for t in like],
        version=VERSION,
    )
    return tuple(results)


# In the texts below: b batch, l length, G groups, c heads of a group, K and V widths. Names in _t
# belong to one time step, names in _s are sequences with time first. As sequences q and k are
# (l, b, G, 1, K, 1), v is (l, b, G, c, 1, V), beta is (l, b, G, c, 1, 1), and g is
# (l, b, G, c, 1 or K, 1).
_PREPARE = f"""
        {exact_scale("g")}
        unit = Constant <value_ints = [1]> ()
        batch = Shape <start = 0, end = 1> (v)
        length = Shape <start = 1, end = 2> (v)
        axis_0 = Constant <value_ints = [0]> ()
        axes_KV = Constant <value_ints = [4, 5]> ()
        groups = Shape <start = 2, end = 3> (q)
        keys = Shape <start = 3, end = 4> (q)
        heads = Shape <start = 2, end = 3> (v)
        values = Shape <start = 3, end = 4> (v)
        channels = Shape <start = 3, end = 4> (g)
        group_size = Div(heads, groups)
        key_split = Concat <axis = 0> (length, batch, groups, unit, keys, unit)
        value_split = Concat <axis = 0> (length, batch, groups, group_size, unit, values)
        decay_split = Concat <axis = 0> (length, batch, groups, group_size, channels, unit)
        rate_split = Concat <axis = 0> (length, batch, groups, group_size)
        state_split = Concat <axis = 0> (batch, groups, group_size, keys, values)

        q_wide = CastLike(q, g)
        q_scaled = Mul(q_wide, scale)
        q_time = Transpose <perm = [1, 0, 2, 3]> (q_scaled)
        q_s = Reshape <allowzero = 1> (q_time, key_split)
        k_wide = CastLike(k, g)
        k_time = Transpose <perm = [1, 0, 2, 3]> (k_wide)
        k_s = Reshape <allowzero = 1> (k_time, key_split)
        v_wide = CastLike(v, g)
        v_time = Transpose <perm = [1, 0, 2, 3]> (v_wide)
        v_s = Reshape <allowzero = 1> (v_time, value_split)
        value_shape = Shape(v_time)
        decays = Exp(g)
        decay_time = Transpose <perm = [1, 0, 2, 3]> (decays)
        decay_s = Reshape <allowzero = 1> (decay_time, decay_split)
        beta_time = Transpose <perm = [1, 0, 2]> (beta)
        beta_groups = Reshape <allowzero = 1> (beta_time, rate_split)
        beta_s = Unsqueeze(beta_groups, axes_KV)
        initial = Reshape <allowzero = 1> (initial_state, state_split)
        state_shape = Shape(initial_state)
"""

_STEP = """
            axis_K = Constant <value_ints = [3]> ()
            kept = Mul(decay_t, state)
            matched = Mul(kept, k_t)
            known = ReduceSum(matched, axis_K)
            error = Sub(v_t, known)
            update = Mul(beta_t, error)
            written = Mul(k_t, update)
            state_t = Add(kept, written)
"""
"""One step of the recurrence, from the state before it, (b, G, c, K, V)."""

_FORWARD = f"""gated_delta_rule <scale_mantissa, scale_exponent>
        (q, k, v, g, beta, initial_state) => (out, final_state) {{
        {_PREPARE}
        last, out_s = Scan <num_scan_inputs = 5,
            body = step (state, q_t, k_t, v_t, decay_t, beta_t) => (state_t, out_t) {{
            {_STEP}
            read = Mul(state_t, q_t)
            out_t = ReduceSum(read, axis_K)
        }}> (initial, q_s, k_s, v_s, decay_s, beta_s)
        out_time = Reshape <allowzero = 1> (out_s, value_shape)
        out_wide = Transpose <perm = [1, 0, 2, 3]> (out_time)
        out = CastLike(out_wide, v)
        final_state = Reshape <allowzero = 1> (last, state_shape)
        }}"""

_BACKWARD = f"""gated_delta_rule_backward <scale_mantissa, scale_exponent>
        (dout, dfinal_state, q, k, v, g, beta, initial_state)
        => (dq, dk, dv, dg, dbeta, dinitial_state) {{
        {_PREPARE}
        last, state_s = Scan <num_scan_inputs = 4,
            body = step (state, k_t, v_t, decay_t, beta_t) => (state_t, before) {{
            before = Identity(state)
            {_STEP}
        }}> (initial, k_s, v_s, decay_s, beta_s)

        dout_wide = CastLike(dout, g)
        dout_time = Transpose <perm = [1, 0, 2, 3]> (dout_wide)
        dout_s = Reshape <allowzero = 1> (dout_time, value_split)
        first = Constant <value_ints = [-1]> ()
        past = Constant <value_ints = [-9223372036854775807]> ()
        back = Constant <value_ints = [-1]> ()
        q_r = Slice(q_s, first, past, axis_0, back)
        k_r = Slice(k_s, first, past, axis_0, back)
        v_r = Slice(v_s, first, past, axis_0, back)
        decay_r = Slice(decay_s, first, past, axis_0, back)
        beta_r = Slice(beta_s, first, past, axis_0, back)
        dout_r = Slice(dout_s, first, past, axis_0, back)
        state_r = Slice(state_s, first, past, axis_0, back)
        dlast = Reshape <allowzero = 1> (dfinal_state, state_split)
        dfirst, dq_r, dk_r, dv_r, ddecay_r, dbeta_r = Scan <num_scan_inputs = 7,
            body = step_back (dlater, q_t, k_t, v_t, decay_t, beta_t, dout_t, state)
                => (dearlier, dq_t, dk_t, dv_t, ddecay_t, dbeta_t) {{
            {_STEP}
            axis_V = Constant <value_ints = [4]> ()
            axis_c = Constant <value_ints = [2]> ()
            axes_cV = Constant <value_ints = [2, 4]> ()
            dread = Mul(q_t, dout_t)
            dstate = Add(dlater, dread)
            dq_heads = Mul(state_t, dout_t)
            dq_t = ReduceSum(dq_heads, axes_cV)
            dmatched = Mul(dstate, k_t)
            dupdate = ReduceSum(dmatched, axis_K)
            dv_t = Mul(beta_t, dupdate)
            dbeta_V = Mul(dupdate, error)
            dbeta_t = ReduceSum(dbeta_V, axis_V)
            dk_written = Mul(dstate, update)
            dk_known = Mul(kept, dv_t)
            dk_both = Sub(dk_written, dk_known)
            dk_t = ReduceSum(dk_both, axes_cV)
            dknown = Mul(k_t, dv_t)
            dkept = Sub(dstate, dknown)
            ddecay_V = Mul(kept, dkept)
            ddecay_t = ReduceSum(ddecay_V, axis_V)
            dearlier = Mul(decay_t, dkept)
        }}> (dlast, q_r, k_r, v_r, decay_r, beta_r, dout_r, state_r)

        key_shape = Shape(q_time)
        dq_s = Slice(dq_r, first, past, axis_0, back)
        dq_time = Reshape <allowzero = 1> (dq_s, key_shape)
        dq_scaled = Transpose <perm = [1, 0, 2, 3]> (dq_time)
        dq_wide = Mul(dq_scaled, scale)
        dq = CastLike(dq_wide, q)
        dk_s = Slice(dk_r, first, past, axis_0, back)
        dk_time = Reshape <allowzero = 1> (dk_s, key_shape)
        dk_wide = Transpose <perm = [1, 0, 2, 3]> (dk_time)
        dk = CastLike(dk_wide, k)
        dv_s = Slice(dv_r, first, past, axis_0, back)
        dv_time = Reshape <allowzero = 1> (dv_s, value_shape)
        dv_wide = Transpose <perm = [1, 0, 2, 3]> (dv_time)
        dv = CastLike(dv_wide, v)

        last_axis = Constant <value_ints = [4]> ()
        of_channel = Div(keys, channels)
        channels_flat = Concat <axis = 0> (length, batch, heads, channels, of_channel)
        ddecay_s = Slice(ddecay_r, first, past, axis_0, back)
        ddecay_time = Reshape <allowzero = 1> (ddecay_s, channels_flat)
        ddecay = Transpose <perm = [1, 0, 2, 3, 4]> (ddecay_time)
        dg = ReduceSum <keepdims = 0> (ddecay, last_axis)

        rate_shape = Shape(beta_time)
        dbeta_s = Slice(dbeta_r, first, past, axis_0, back)
        dbeta_time = Reshape <allowzero = 1> (dbeta_s, rate_shape)
        dbeta = Transpose <perm = [1, 0, 2]> (dbeta_time)
        dinitial_state = Reshape <allowzero = 1> (dfirst, state_shape)
        }}"""
