"""The rule and its backward as ONNX: nodes of domain `fuseport.ops`, with bodies.

The bodies follow the definition, step by step, with `Scan`; they know nothing of dtypes and compute
in log_decay's. They use only what onnx's reference evaluator has too: `Scan` along axis 0, forward
in time; time is reversed with `Slice`.
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
    return {"dplr_delta_rule": _rule, "dplr_delta_rule_backward": _rule_backward}


def functions(opset: int) -> list[FunctionProto]:
    """The bodies of the nodes, in standard operators of `opset`, 18 or later."""
    return parsed((_FORWARD, _BACKWARD), opset)


def _rule(*inputs: Any) -> tuple[Tensor, ...]:
    *tensors, scale = inputs
    return _node("dplr_delta_rule", tensors, scale, [tensors[2], tensors[6]])


def _rule_backward(*inputs: Any) -> tuple[Tensor, ...]:
    *tensors, scale = inputs
    # Gradients come in the order of the inputs they belong to.
    return _node("dplr_delta_rule_backward", tensors, scale, tensors[2:])


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


# In the texts below: n batch, l length, H heads, K and V widths. Names in _t belong to one time
# step, names in _s are sequences with time first: those of keys are (l, n, H, K, 1), v is
# (l, n, H, 1, V).
_PREPARE = f"""
        {exact_scale("log_decay")}
        axis_0 = Constant <value_ints = [0]> ()
        axis_column = Constant <value_ints = [4]> ()
        axis_row = Constant <value_ints = [3]> ()
        q_wide = CastLike(q, log_decay)
        q_scaled = Mul(q_wide, scale)
        q_time = Transpose <perm = [1, 0, 2, 3]> (q_scaled)
        q_s = Unsqueeze(q_time, axis_column)
        k_wide = CastLike(k, log_decay)
        k_time = Transpose <perm = [1, 0, 2, 3]> (k_wide)
        k_s = Unsqueeze(k_time, axis_column)
        v_wide = CastLike(v, log_decay)
        v_time = Transpose <perm = [1, 0, 2, 3]> (v_wide)
        v_s = Unsqueeze(v_time, axis_row)
        a_wide = CastLike(a, log_decay)
        a_time = Transpose <perm = [1, 0, 2, 3]> (a_wide)
        a_s = Unsqueeze(a_time, axis_column)
        b_wide = CastLike(b, log_decay)
        b_time = Transpose <perm = [1, 0, 2, 3]> (b_wide)
        b_s = Unsqueeze(b_time, axis_column)
        decays = Exp(log_decay)
        decay_time = Transpose <perm = [1, 0, 2, 3]> (decays)
        decay_s = Unsqueeze(decay_time, axis_column)
"""

_STEP = """
            axis_K = Constant <value_ints = [2]> ()
            matched = Mul(state, a_t)
            known = ReduceSum(matched, axis_K)
            kept = Mul(decay_t, state)
            written = Mul(k_t, v_t)
            returned = Mul(b_t, known)
            partly = Add(kept, written)
            state_t = Add(partly, returned)
"""
"""One step of the recurrence, from the state before it, (n, H, K, V)."""

_FORWARD = f"""dplr_delta_rule <scale_mantissa, scale_exponent>
        (q, k, v, a, b, log_decay, initial_state) => (out, final_state) {{
        {_PREPARE}
        final_state, out_s = Scan <num_scan_inputs = 6,
            body = step (state, q_t, k_t, v_t, a_t, b_t, decay_t) => (state_t, out_t) {{
            {_STEP}
            read = Mul(state_t, q_t)
            out_t = ReduceSum <keepdims = 0> (read, axis_K)
        }}> (initial_state, q_s, k_s, v_s, a_s, b_s, decay_s)
        out_wide = Transpose <perm = [1, 0, 2, 3]> (out_s)
        out = CastLike(out_wide, v)
        }}"""


def _reversed(names: str) -> str:
    """`<name>_r` of each `<name>_s`, from the last step to the first."""
    lines = (f"{name}_r = Slice({name}_s, first, past, axis_0, back)" for name in names.split())
    return "\n        ".join(lines)


def _gradient(name: str, of: str, factor: str = "") -> str:
    """`d<of>` of `d<name>_r`, which has no dimension of size 1, in its input's dtype."""
    text = f"""
        d{name}_s = Slice(d{name}_r, first, past, axis_0, back)
        d{name}_time = Transpose <perm = [1, 0, 2, 3]> (d{name}_s)
    """
    last = f"d{name}_time"
    if factor:
        text += f"    d{name}_scaled = Mul({last}, {factor})\n"
        last = f"d{name}_scaled"
    return text + f"    d{of} = CastLike({last}, {of})\n"


_BACKWARD = f"""dplr_delta_rule_backward <scale_mantissa, scale_exponent>
        (dout, dfinal_state, q, k, v, a, b, log_decay, initial_state)
        => (dq, dk, dv, da, db, dlog_decay, dinitial_state) {{
        {_PREPARE}
        last, state_s = Scan <num_scan_inputs = 5,
            body = step (state, k_t, v_t, a_t, b_t, decay_t) => (state_t, before) {{
            before = Identity(state)
            {_STEP}
        }}> (initial_state, k_s, v_s, a_s, b_s, decay_s)

        dout_wide = CastLike(dout, log_decay)
        dout_time = Transpose <perm = [1, 0, 2, 3]> (dout_wide)
        dout_s = Unsqueeze(dout_time, axis_row)
        first = Constant <value_ints = [-1]> ()
        past = Constant <value_ints = [-9223372036854775807]> ()
        back = Constant <value_ints = [-1]> ()
        {_reversed("q k v a b decay dout state")}
        dinitial_state, dq_r, dk_r, dv_r, da_r, db_r, ddecay_r = Scan <num_scan_inputs = 8,
            body = step_back (dlater, q_t, k_t, v_t, a_t, b_t, decay_t, dout_t, state)
                => (dearlier, dq_t, dk_t, dv_t, da_t, db_t, ddecay_t) {{
            {_STEP}
            axis_V = Constant <value_ints = [3]> ()
            dread = Mul(q_t, dout_t)
            dstate = Add(dlater, dread)
            dq_V = Mul(state_t, dout_t)
            dq_t = ReduceSum <keepdims = 0> (dq_V, axis_V)
            dk_V = Mul(dstate, v_t)
            dk_t = ReduceSum <keepdims = 0> (dk_V, axis_V)
            dv_K = Mul(dstate, k_t)
            dv_t = ReduceSum <keepdims = 0> (dv_K, axis_K)
            dreturned = Mul(dstate, b_t)
            dknown = ReduceSum(dreturned, axis_K)
            db_V = Mul(dstate, known)
            db_t = ReduceSum <keepdims = 0> (db_V, axis_V)
            da_V = Mul(state, dknown)
            da_t = ReduceSum <keepdims = 0> (da_V, axis_V)
            ddecay_V = Mul(kept, dstate)
            ddecay_t = ReduceSum <keepdims = 0> (ddecay_V, axis_V)
            dkept = Mul(decay_t, dstate)
            dmatched = Mul(a_t, dknown)
            dearlier = Add(dkept, dmatched)
        }}> (dfinal_state, q_r, k_r, v_r, a_r, b_r, decay_r, dout_r, state_r)
        {_gradient("q", "q", "scale")}
        {_gradient("k", "k")}
        {_gradient("v", "v")}
        {_gradient("a", "a")}
        {_gradient("b", "b")}
        {_gradient("decay", "log_decay")}
        }}"""
