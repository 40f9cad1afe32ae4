"""Deformable attention and its backward as ONNX: nodes of `fuseport.ops`, with function bodies.

A node takes locations and weights in the dtype of computation; the decompositions bring them to
that. The bodies take the spatial shapes as data: pixels of all levels are rows of one table, which
`Gather` reads and `ScatterElements` adds to. Not `ScatterND`: where indices recur, that of ONNX
Runtime (1.31) loses sums of one thread to another's.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from onnx import FunctionProto
from torch import Tensor

from fuseport.ops.ms_deform_attn.shapes import wide
from fuseport.ops.onnx_bodies import DOMAIN, VERSION, parsed

__all__ = ["DOMAIN", "VERSION", "corners_text", "decompositions", "functions"]


def decompositions() -> dict[str, Callable[..., Any]]:
    """For each operator of the op, by name, its form as one symbolic ONNX node."""
    return {"ms_deform_attn": _forward, "ms_deform_attn_backward": _backward}


def functions(opset: int) -> list[FunctionProto]:
    """The bodies of the nodes, in standard operators of `opset`, 18 or later."""
    return parsed((_FORWARD, _BACKWARD), opset)


def _forward(
    value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor
) -> Tensor:
    b, _, h, c = value.shape
    (out,) = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::ms_deform_attn",
        (value, shapes, starts, *_wide(value, locations, weights)),
        dtypes=(value.dtype,),
        shapes=((b, locations.shape[1], h * c),),
        version=VERSION,
    )
    return out


def _backward(
    dout: Tensor,
    value: Tensor,
    shapes: Tensor,
    starts: Tensor,
    locations: Tensor,
    weights: Tensor,
) -> tuple[Tensor, ...]:
    inputs = (dout, value, shapes, starts, *_wide(value, locations, weights))
    given = (value, *inputs[4:])
    dvalue, dlocations, dweights = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::ms_deform_attn_backward",
        inputs,
        dtypes=[t.dtype for t in given],
        shapes=[t.shape for t in given],
        version=VERSION,
    )
    if locations.dtype == dlocations.dtype:
        return dvalue, dlocations, dweights
    return dvalue, dlocations.to(locations.dtype), dweights.to(weights.dtype)


def _wide(value: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
    dtype = wide(value.dtype)
    return tuple(t if t.dtype == dtype else t.to(dtype) for t in given)


def corners_text() -> str:
    """The four pixels around each of many points, as `bilinear.corners` has them.

    Reads x, y, width, height, one and zero, all of the dtype of computation, and width_i, an
    integer. For each corner k it gives its index in the map, index_k, whether that is in the map,
    valid_k, its weight, and the slopes x_k and y_k of the weight.
    """
    text = """
        minus_one = Neg(one)
        right_of = Greater(x, minus_one)
        left_of = Less(x, width)
        under = Greater(y, minus_one)
        over = Less(y, height)
        inside_x = And(right_of, left_of)
        inside_y = And(under, over)
        inside = And(inside_x, inside_y)
        x_in = Where(inside, x, zero)
        y_in = Where(inside, y, zero)
        x_0 = Floor(x_in)
        y_0 = Floor(y_in)
        x_1 = Add(x_0, one)
        y_1 = Add(y_0, one)
        share_x_1 = Sub(x_in, x_0)
        share_y_1 = Sub(y_in, y_0)
        share_x_0 = Sub(one, share_x_1)
        share_y_0 = Sub(one, share_y_1)
        not_x_0 = Greater(x_0, minus_one)
        not_y_0 = Greater(y_0, minus_one)
        valid_x_0 = And(inside, not_x_0)
        valid_y_0 = And(inside, not_y_0)
        not_x_1 = Less(x_1, width)
        not_y_1 = Less(y_1, height)
        valid_x_1 = And(inside, not_x_1)
        valid_y_1 = And(inside, not_y_1)
        column_0 = Cast <to = 7> (x_0)
        column_1 = Cast <to = 7> (x_1)
        line_0 = Cast <to = 7> (y_0)
        line_1 = Cast <to = 7> (y_1)
        down_0 = Mul(line_0, width_i)
        down_1 = Mul(line_1, width_i)
"""
    for k, (below, right) in enumerate(product((0, 1), (0, 1))):
        text += f"""
        valid_{k} = And(valid_y_{below}, valid_x_{right})
        index_{k} = Add(down_{below}, column_{right})
        weight_{k} = Mul(share_y_{below}, share_x_{right})
        slope_x_{k} = {"Identity" if right else "Neg"}(share_y_{below})
        slope_y_{k} = {"Identity" if below else "Neg"}(share_x_{right})
"""
    return text


# In the texts below: b batch, s positions, h heads, c channels, q queries, L levels, P points; all
# names that end in _dim are tensors of one integer. Points are (b, q, h, L, P).

_PREPARE = """
        b_dim = Shape <start = 0, end = 1> (value)
        s_dim = Shape <start = 1, end = 2> (value)
        h_dim = Shape <start = 2, end = 3> (value)
        c_dim = Shape <start = 3, end = 4> (value)
        q_dim = Shape <start = 1, end = 2> (locations)
        L_dim = Shape <start = 3, end = 4> (locations)
        P_dim = Shape <start = 4, end = 5> (locations)
        points_dim = Mul(L_dim, P_dim)
        one_dim = Constant <value_ints = [1]> ()
        one_i = Constant <value_int = 1> ()
        zero_i = Constant <value_int = 0> ()
        one_float = Constant <value_float = 1.0> ()
        one = CastLike(one_float, weights)
        zero_float = Constant <value_float = 0.0> ()
        zero = CastLike(zero_float, weights)
        half_float = Constant <value_float = 0.5> ()
        half = CastLike(half_float, weights)
        axis_1 = Constant <value_ints = [1]> ()
        height_L = Gather <axis = 1> (shapes, zero_i)
        width_L = Gather <axis = 1> (shapes, one_i)
        height_i = Unsqueeze(height_L, axis_1)
        width_i = Unsqueeze(width_L, axis_1)
        start_i = Unsqueeze(starts, axis_1)
        height = CastLike(height_i, weights)
        width = CastLike(width_i, weights)
        location_x = Gather <axis = 5> (locations, zero_i)
        location_y = Gather <axis = 5> (locations, one_i)
        x_edge = Mul(location_x, width)
        y_edge = Mul(location_y, height)
        x = Sub(x_edge, half)
        y = Sub(y_edge, half)

        value_wide = CastLike(value, weights)
        margin_shape = Concat <axis = 0> (b_dim, one_dim, h_dim, c_dim)
        margin = Expand(zero, margin_shape)
        table_4d = Concat <axis = 1> (value_wide, margin)
        positions_dim = Add(s_dim, one_dim)
        heads_dim = Mul(positions_dim, h_dim)
        rows_dim = Mul(b_dim, heads_dim)
        table_shape = Concat <axis = 0> (rows_dim, c_dim)
        table = Reshape <allowzero = 1> (table_4d, table_shape)
        b_scalar = Squeeze(b_dim)
        h_scalar = Squeeze(h_dim)
        batches = Range(zero_i, b_scalar, one_i)
        heads = Range(zero_i, h_scalar, one_i)
        batch_axes = Constant <value_ints = [1, 2, 3, 4]> ()
        head_axes = Constant <value_ints = [1, 2]> ()
        batch_b = Unsqueeze(batches, batch_axes)
        batch = Mul(batch_b, heads_dim)
        head = Unsqueeze(heads, head_axes)
        table_offset = Add(batch, head)
        seen_shape = Concat <axis = 0> (b_dim, q_dim, h_dim, points_dim, c_dim)
        share_shape = Concat <axis = 0> (b_dim, q_dim, h_dim, one_dim, points_dim)
        out_dim = Mul(h_dim, c_dim)
        out_shape = Concat <axis = 0> (b_dim, q_dim, out_dim)
"""
"""The points in units of pixels; value as a table of rows of c channels, with a row of zeros for
each head after its last position."""


def _rows(k: int) -> str:
    """`seen_k`, (b, q, h, LP, c), the pixels; `row_k`, where in the table they are."""
    return f"""
        position_in_{k} = Add(index_{k}, start_i)
        position_{k} = Where(valid_{k}, position_in_{k}, s_dim)
        offset_{k} = Mul(position_{k}, h_dim)
        row_{k} = Add(offset_{k}, table_offset)
        pixels_{k} = Gather <axis = 0> (table, row_{k})
        seen_{k} = Reshape <allowzero = 1> (pixels_{k}, seen_shape)
        share_{k} = Mul(weights, weight_{k})
"""


def _sum(name: str, terms: list[str]) -> str:
    """ONNX's Sum takes float types only in some runtimes' function inlining: pairs, then."""
    first, second, third, last = terms
    return f"""
        {name}_01 = Add({first}, {second})
        {name}_23 = Add({third}, {last})
        {name} = Add({name}_01, {name}_23)
"""


def _forward_text() -> str:
    text = _PREPARE + corners_text()
    for k in range(4):
        text += (
            _rows(k)
            + f"""
        share_row_{k} = Reshape <allowzero = 1> (share_{k}, share_shape)
        out_{k} = MatMul(share_row_{k}, seen_{k})
"""
        )
    return f"""ms_deform_attn (value, shapes, starts, locations, weights) => (out) {{
        {text} {_sum("out_5d", [f"out_{k}" for k in range(4)])}
        out_wide = Reshape <allowzero = 1> (out_5d, out_shape)
        out = CastLike(out_wide, value)
    }}"""


def _backward_text() -> str:
    text = (
        _PREPARE
        + corners_text()
        + """
        dout_wide = CastLike(dout, weights)
        g_row_shape = Concat <axis = 0> (b_dim, q_dim, h_dim, one_dim, c_dim)
        g_column_shape = Concat <axis = 0> (b_dim, q_dim, h_dim, c_dim, one_dim)
        g_row = Reshape <allowzero = 1> (dout_wide, g_row_shape)
        g_column = Reshape <allowzero = 1> (dout_wide, g_column_shape)
        points_shape = Shape(weights)
        share_column_shape = Concat <axis = 0> (b_dim, q_dim, h_dim, points_dim, one_dim)
        queries_dim = Mul(b_dim, q_dim)
        samples_h_dim = Mul(queries_dim, h_dim)
        samples_dim = Mul(samples_h_dim, points_dim)
        column_shape = Concat <axis = 0> (samples_dim, one_dim)
        given_shape = Concat <axis = 0> (samples_dim, c_dim)
        dtable_0 = Expand(zero, table_shape)
"""
    )
    for k in range(4):
        text += (
            _rows(k)
            + f"""
        dot_column_{k} = MatMul(seen_{k}, g_column)
        dot_{k} = Reshape <allowzero = 1> (dot_column_{k}, points_shape)
        dweight_{k} = Mul(weight_{k}, dot_{k})
        dx_{k} = Mul(slope_x_{k}, dot_{k})
        dy_{k} = Mul(slope_y_{k}, dot_{k})
        share_column_{k} = Reshape <allowzero = 1> (share_{k}, share_column_shape)
        given_5d_{k} = Mul(share_column_{k}, g_row)
        given_{k} = Reshape <allowzero = 1> (given_5d_{k}, given_shape)
        row_column_{k} = Reshape <allowzero = 1> (row_{k}, column_shape)
        target_{k} = Expand(row_column_{k}, given_shape)
        dtable_{k + 1} = ScatterElements <axis = 0, reduction = "add"> (
            dtable_{k}, target_{k}, given_{k})
"""
        )
    sums = "".join(_sum(name, [f"{name}_{k}" for k in range(4)]) for name in ("dx", "dy"))
    return f"""ms_deform_attn_backward (dout, value, shapes, starts, locations, weights)
        => (dvalue, dlocations, dweights) {{
        {text} {sums} {_sum("dweights", [f"dweight_{k}" for k in range(4)])}
        scale_x = Mul(weights, width)
        scale_y = Mul(weights, height)
        dlocation_x = Mul(dx, scale_x)
        dlocation_y = Mul(dy, scale_y)
        axis_5 = Constant <value_ints = [5]> ()
        dlocation_x_6d = Unsqueeze(dlocation_x, axis_5)
        dlocation_y_6d = Unsqueeze(dlocation_y, axis_5)
        dlocations = Concat <axis = 5> (dlocation_x_6d, dlocation_y_6d)
        dtable_shape = Concat <axis = 0> (b_dim, positions_dim, h_dim, c_dim)
        dtable_4d = Reshape <allowzero = 1> (dtable_4, dtable_shape)
        zero_dim = Constant <value_ints = [0]> ()
        dvalue_wide = Slice(dtable_4d, zero_dim, s_dim, axis_1)
        dvalue = CastLike(dvalue_wide, value)
    }}"""


_FORWARD = _forward_text()
_BACKWARD = _backward_text()
