"""The state update as ONNX: nodes of domain `fuseport.ops`, with function bodies.

The bodies know nothing of dtypes: they compute in A's.
"""

from collections.abc import Callable
from typing import Any

import torch
from onnx import FunctionProto
from torch import Tensor

from fuseport.ops.onnx_bodies import DOMAIN, SILU, VERSION, parsed, softplus

__all__ = ["DOMAIN", "VERSION", "decompositions", "functions"]


def decompositions() -> dict[str, Callable[..., Any]]:
    """For each operator of the op, by name, its form as one symbolic ONNX node."""
    return {"selective_state_update": _update, "selective_state_update_gated": _update_gated}


def functions(opset: int) -> list[FunctionProto]:
    """The bodies of the nodes, in standard operators of `opset`, 18 or later."""
    texts = [_text(False), _text(True)]
    return parsed(texts, opset)


def _update(*inputs: Any) -> tuple[Tensor, ...]:
    return _node("selective_state_update", inputs)


def _update_gated(*inputs: Any) -> tuple[Tensor, ...]:
    return _node("selective_state_update_gated", inputs)


def _node(name: str, inputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
    *tensors, softplus = inputs
    state, x, *_ = tensors
    results = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::{name}",
        tensors,
        {"dt_softplus": int(softplus)},
        dtypes=(x.dtype, state.dtype),
        shapes=(x.shape, state.shape),
        version=VERSION,
    )
    return tuple(results)


def _text(gated: bool) -> str:
    name = "selective_state_update_gated" if gated else "selective_state_update"
    gate = "z, " if gated else ""
    return (
        f"""{name} <dt_softplus> (state, x, dt, A, B, C, D, {gate}dt_bias) => (out, new_state) {{"""
        + _STEP
        + (_GATE if gated else "result = Identity(ungated)")
        + """
        out = CastLike(result, x)
        new_state = CastLike(new_wide, state)
        }"""
    )


# B and C are brought from (b, g, N) to (b, h, 1, N) by an Expand along a dimension of the heads of
# a group.
_STEP = (
    """
        one_float = Constant <value_float = 1.0> ()
        one = CastLike(one_float, A)
        last = Constant <value_ints = [3]> ()
        axis_2 = Constant <value_ints = [2]> ()
        unit = Constant <value_ints = [1]> ()
        dt_wide = CastLike(dt, A)
        raw = Add(dt_wide, dt_bias)
"""
    + softplus("dt_softplus", "step")
    + """
        batch = Shape <start = 0, end = 1> (B)
        groups = Shape <start = 1, end = 2> (B)
        states = Shape <start = 2, end = 3> (B)
        heads = Shape <start = 1, end = 2> (x)
        group_size = Div(heads, groups)
        spread = Concat <axis = 0> (batch, groups, group_size, states)
        per_head = Concat <axis = 0> (batch, heads, unit, states)
        B_wide = CastLike(B, A)
        B_column = Unsqueeze(B_wide, axis_2)
        B_spread = Expand(B_column, spread)
        B_heads = Reshape <allowzero = 1> (B_spread, per_head)
        C_wide = CastLike(C, A)
        C_column = Unsqueeze(C_wide, axis_2)
        C_spread = Expand(C_column, spread)
        C_heads = Reshape <allowzero = 1> (C_spread, per_head)

        x_wide = CastLike(x, A)
        state_wide = CastLike(state, A)
        step_column = Unsqueeze(step, last)
        exponent = Mul(step_column, A)
        decay = Exp(exponent)
        kept = Mul(decay, state_wide)
        step_x = Mul(step, x_wide)
        step_x_column = Unsqueeze(step_x, last)
        inflow = Mul(step_x_column, B_heads)
        new_wide = Add(kept, inflow)
        read = Mul(new_wide, C_heads)
        y = ReduceSum <keepdims = 0> (read, last)
        skip = Mul(D, x_wide)
        ungated = Add(y, skip)
"""
)

_GATE = f"""
        z_wide = CastLike(z, A)
        {SILU}
        result = Mul(ungated, silu_z)
"""
