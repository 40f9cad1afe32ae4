"""Deformable convolution and its backward as ONNX: nodes of `fuseport.ops`, with function bodies.

A node takes and gives tensors of the dtype of computation; the decompositions cast around it. From
opset 19 on, `DeformConv` computes what the forward nodes do: its `offset` and `mask` are laid out
alike, its inputs come in the order X, W, offset, B, mask.

Bodies gather pixels as rows of a table, as those of `ms_deform_attn` do, and multiply matrices.
"""

from collections.abc import Callable
from typing import Any

import torch
from onnx import FunctionProto
from torch import Tensor

from fuseport.ops.deform_conv2d.shapes import Options
from fuseport.ops.ms_deform_attn.onnx import corners_text
from fuseport.ops.onnx_bodies import DOMAIN, VERSION, parsed

__all__ = ["DOMAIN", "VERSION", "decompositions", "functions"]


def decompositions() -> dict[str, Callable[..., Any]]:
    """For each operator of the op, by name, its form as one symbolic ONNX node."""
    return {
        "deform_conv2d": _plain,
        "deform_conv2d_modulated": _modulated,
        "deform_conv2d_backward": _plain_backward,
        "deform_conv2d_modulated_backward": _modulated_backward,
    }


def functions(opset: int) -> list[FunctionProto]:
    """The bodies of the nodes, in standard operators of `opset`, 18 or later."""
    texts = [text(modulated) for text in (_forward, _backward) for modulated in (False, True)]
    return parsed(texts, opset)


def _plain(*given: Any) -> Tensor:
    return _node("deform_conv2d", *given)


def _modulated(*given: Any) -> Tensor:
    return _node("deform_conv2d_modulated", *given)


def _plain_backward(dout: Tensor, *given: Any) -> tuple[Tensor, ...]:
    return _backward_node("deform_conv2d_backward", dout, *given)


def _modulated_backward(dout: Tensor, *given: Any) -> tuple[Tensor, ...]:
    return _backward_node("deform_conv2d_modulated_backward", dout, *given)


def _node(name: str, *given: Any) -> Tensor:
    count = len(given) - len(Options._fields)
    x, offset, *_, bias = given[:count]
    (out,) = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::{name}",
        tuple(map(_wide, given[:count])),
        Options(*given[count:])._asdict(),
        dtypes=(_wide(x).dtype,),
        shapes=((x.shape[0], bias.shape[0], *offset.shape[2:]),),
        version=VERSION,
    )
    return _like(out, x)


def _backward_node(name: str, dout: Tensor, *given: Any) -> tuple[Tensor, ...]:
    count = len(given) - len(Options._fields)
    tensors = given[:count]
    gradients = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::{name}",
        tuple(map(_wide, (dout, *tensors))),
        Options(*given[count:])._asdict(),
        dtypes=[_wide(t).dtype for t in tensors],
        shapes=[t.shape for t in tensors],
        version=VERSION,
    )
    return tuple(_like(gradient, t) for gradient, t in zip(gradients, tensors, strict=True))


def _wide(t: Tensor) -> Tensor:
    return t if t.dtype in (torch.float32, torch.float64) else t.float()


def _like(t: Tensor, other: Tensor) -> Tensor:
    return t if t.dtype == other.dtype else t.to(other.dtype)


# In the texts below: b batch, c channels, o output channels, G offset groups of e channels, K taps,
# g groups; all names that end in _dim are tensors of one integer. Samples are (b, G, K, oh, ow, e).

_PREPARE = """
        b_dim = Shape <start = 0, end = 1> (x)
        c_dim = Shape <start = 1, end = 2> (x)
        H_dim = Shape <start = 2, end = 3> (x)
        W_dim = Shape <start = 3, end = 4> (x)
        o_dim = Shape <start = 0, end = 1> (weight)
        per_group_dim = Shape <start = 1, end = 2> (weight)
        kh_dim = Shape <start = 2, end = 3> (weight)
        kw_dim = Shape <start = 3, end = 4> (weight)
        parts_dim = Shape <start = 1, end = 2> (offset)
        oh_dim = Shape <start = 2, end = 3> (offset)
        ow_dim = Shape <start = 3, end = 4> (offset)
        one_dim = Constant <value_ints = [1]> ()
        two_dim = Constant <value_ints = [2]> ()
        zero_dim = Constant <value_ints = [0]> ()
        K_dim = Mul(kh_dim, kw_dim)
        K2_dim = Mul(K_dim, two_dim)
        G_dim = Div(parts_dim, K2_dim)
        e_dim = Div(c_dim, G_dim)
        g_dim = Div(c_dim, per_group_dim)
        o_group_dim = Div(o_dim, g_dim)
        terms_dim = Mul(per_group_dim, K_dim)
        outputs_dim = Mul(oh_dim, ow_dim)
        pixels_dim = Mul(H_dim, W_dim)
        table_dim = Add(pixels_dim, one_dim)
        bG_dim = Mul(b_dim, G_dim)
        rows_dim = Mul(bG_dim, table_dim)
        one_i = Constant <value_int = 1> ()
        zero_i = Constant <value_int = 0> ()
        one_float = Constant <value_float = 1.0> ()
        one = CastLike(one_float, x)
        zero_float = Constant <value_float = 0.0> ()
        zero = CastLike(zero_float, x)

        stride_h_i = Constant <value_int: int = @stride_h> ()
        stride_w_i = Constant <value_int: int = @stride_w> ()
        padding_h_i = Constant <value_int: int = @padding_h> ()
        padding_w_i = Constant <value_int: int = @padding_w> ()
        dilation_h_i = Constant <value_int: int = @dilation_h> ()
        dilation_w_i = Constant <value_int: int = @dilation_w> ()
        K_scalar = Squeeze(K_dim)
        oh_scalar = Squeeze(oh_dim)
        ow_scalar = Squeeze(ow_dim)
        taps = Range(zero_i, K_scalar, one_i)
        tap_row = Div(taps, kw_dim)
        tap_column = Mod(taps, kw_dim)
        tap_y = Mul(tap_row, dilation_h_i)
        tap_x = Mul(tap_column, dilation_w_i)
        outputs_y = Range(zero_i, oh_scalar, one_i)
        outputs_x = Range(zero_i, ow_scalar, one_i)
        strided_y = Mul(outputs_y, stride_h_i)
        strided_x = Mul(outputs_x, stride_w_i)
        first_y = Sub(strided_y, padding_h_i)
        first_x = Sub(strided_x, padding_w_i)
        tap_axes = Constant <value_ints = [1, 2]> ()
        row_axis = Constant <value_ints = [1]> ()
        tap_y_3d = Unsqueeze(tap_y, tap_axes)
        tap_x_3d = Unsqueeze(tap_x, tap_axes)
        first_y_2d = Unsqueeze(first_y, row_axis)
        grid_y_i = Add(tap_y_3d, first_y_2d)
        grid_x_i = Add(tap_x_3d, first_x)
        grid_y = CastLike(grid_y_i, x)
        grid_x = CastLike(grid_x_i, x)
        offset_shape = Concat <axis = 0> (b_dim, G_dim, K_dim, two_dim, oh_dim, ow_dim)
        offset_6d = Reshape <allowzero = 1> (offset, offset_shape)
        dy_given = Gather <axis = 3> (offset_6d, zero_i)
        dx_given = Gather <axis = 3> (offset_6d, one_i)
        y = Add(grid_y, dy_given)
        x_at = Add(grid_x, dx_given)
        samples_shape = Concat <axis = 0> (b_dim, G_dim, K_dim, oh_dim, ow_dim)

        split_shape = Concat <axis = 0> (b_dim, G_dim, e_dim, pixels_dim)
        split = Reshape <allowzero = 1> (x, split_shape)
        pixels = Transpose <perm = [0, 1, 3, 2]> (split)
        margin_shape = Concat <axis = 0> (b_dim, G_dim, one_dim, e_dim)
        margin = Expand(zero, margin_shape)
        table_4d = Concat <axis = 2> (pixels, margin)
        table_shape = Concat <axis = 0> (rows_dim, e_dim)
        table = Reshape <allowzero = 1> (table_4d, table_shape)
        bG_scalar = Squeeze(bG_dim)
        parts = Range(zero_i, bG_scalar, one_i)
        begins = Mul(parts, table_dim)
        begin_shape = Concat <axis = 0> (b_dim, G_dim, one_dim, one_dim, one_dim)
        begin = Reshape <allowzero = 1> (begins, begin_shape)

        kernel_shape = Concat <axis = 0> (g_dim, o_group_dim, terms_dim)
        kernel = Reshape <allowzero = 1> (weight, kernel_shape)
        columns_shape = Concat <axis = 0> (b_dim, g_dim, terms_dim, outputs_dim)
        last_axis = Constant <value_ints = [-1]> ()
        width = CastLike(W_dim, x)
        height = CastLike(H_dim, x)
        width_i = Identity(W_dim)
"""
"""The samples in units of pixels, (b, G, K, oh, ow); the image as a table of rows of e channels,
with a row of zeros after each of b·G images."""


def _samples(modulated: bool) -> str:
    """Of `_PREPARE` and `corners_text`: the pixels, `pixels_k`, and the columns of the product."""
    text = _PREPARE + corners_text().replace("(x, ", "(x_at, ").replace(", x, ", ", x_at, ")
    for k in range(4):
        text += f"""
        known_{k} = Where(valid_{k}, index_{k}, pixels_dim)
        row_{k} = Add(known_{k}, begin)
        pixels_{k} = Gather <axis = 0> (table, row_{k})
        weight_last_{k} = Unsqueeze(weight_{k}, last_axis)
        part_{k} = Mul(pixels_{k}, weight_last_{k})
"""
    text += """
        part_01 = Add(part_0, part_1)
        part_23 = Add(part_2, part_3)
        samples_bare = Add(part_01, part_23)
"""
    if modulated:
        text += """
        factor = Reshape <allowzero = 1> (mask, samples_shape)
        factor_last = Unsqueeze(factor, last_axis)
        samples = Mul(samples_bare, factor_last)
"""
    else:
        text += "\n        samples = Identity(samples_bare)"
    return (
        text
        + """
        channels_first = Transpose <perm = [0, 1, 5, 2, 3, 4]> (samples)
        columns = Reshape <allowzero = 1> (channels_first, columns_shape)
"""
    )


def _head(name: str, inputs: str, outputs: str) -> str:
    return f"{name} <{', '.join(Options._fields)}> ({inputs}) => ({outputs})"


def _forward(modulated: bool) -> str:
    name = "deform_conv2d_modulated" if modulated else "deform_conv2d"
    inputs = f"x, offset, {'mask, ' if modulated else ''}weight, bias"
    return f"""{_head(name, inputs, "out")} {{ {_samples(modulated)}
        product = MatMul(kernel, columns)
        out_shape = Concat <axis = 0> (b_dim, o_dim, oh_dim, ow_dim)
        unbiased = Reshape <allowzero = 1> (product, out_shape)
        bias_3d = Unsqueeze(bias, tap_axes)
        out = Add(unbiased, bias_3d)
    }}"""


def _backward(modulated: bool) -> str:
    name = "deform_conv2d_modulated_backward" if modulated else "deform_conv2d_backward"
    inputs = f"dout, x, offset, {'mask, ' if modulated else ''}weight, bias"
    outputs = f"dinput, doffset, {'dmask, ' if modulated else ''}dweight, dbias"
    text = (
        _samples(modulated)
        + """
        g_shape = Concat <axis = 0> (b_dim, g_dim, o_group_dim, outputs_dim)
        g_4d = Reshape <allowzero = 1> (dout, g_shape)
        columns_back = Transpose <perm = [0, 1, 3, 2]> (columns)
        dkernel_b = MatMul(g_4d, columns_back)
        dkernel = ReduceSum <keepdims = 0> (dkernel_b, zero_dim)
        weight_shape = Shape(weight)
        dweight = Reshape <allowzero = 1> (dkernel, weight_shape)
        width_axis = Constant <value_ints = [3]> ()
        dbias_rows = ReduceSum <keepdims = 0> (dout, width_axis)
        bias_axes = Constant <value_ints = [0, 2]> ()
        dbias = ReduceSum <keepdims = 0> (dbias_rows, bias_axes)
        kernel_back = Transpose <perm = [0, 2, 1]> (kernel)
        dcolumns = MatMul(kernel_back, g_4d)
        dcolumns_shape = Concat <axis = 0> (b_dim, G_dim, e_dim, K_dim, oh_dim, ow_dim)
        dcolumns_6d = Reshape <allowzero = 1> (dcolumns, dcolumns_shape)
        g = Transpose <perm = [0, 1, 3, 4, 5, 2]> (dcolumns_6d)
        samples_bG_dim = Mul(bG_dim, K_dim)
        samples_dim = Mul(samples_bG_dim, outputs_dim)
        index_shape = Concat <axis = 0> (samples_dim, one_dim)
        given_shape = Concat <axis = 0> (samples_dim, e_dim)
        dtable_0 = Expand(zero, table_shape)
        channel_axis = Constant <value_ints = [5]> ()
"""
    )
    for k in range(4):
        share = f"weight_last_{k}"
        if modulated:
            text += f"\n        share_{k} = Mul({share}, factor_last)"
            share = f"share_{k}"
        text += f"""
        dots_all_{k} = Mul(pixels_{k}, g)
        dots_{k} = ReduceSum <keepdims = 0> (dots_all_{k}, channel_axis)
        dmask_{k} = Mul(weight_{k}, dots_{k})
        dx_{k} = Mul(slope_x_{k}, dots_{k})
        dy_{k} = Mul(slope_y_{k}, dots_{k})
        given_6d_{k} = Mul({share}, g)
        given_{k} = Reshape <allowzero = 1> (given_6d_{k}, given_shape)
        index_column_{k} = Reshape <allowzero = 1> (row_{k}, index_shape)
        target_{k} = Expand(index_column_{k}, given_shape)
        dtable_{k + 1} = ScatterElements <axis = 0, reduction = "add"> (
            dtable_{k}, target_{k}, given_{k})
"""
    for term in ("dx", "dy", *(("dmask",) if modulated else ())):
        text += f"""
        {term}_01 = Add({term}_0, {term}_1)
        {term}_23 = Add({term}_2, {term}_3)
        {term}_sum = Add({term}_01, {term}_23)
"""
    for term in ("dx", "dy"):
        text += f"""
        {term}_m = {f"Mul({term}_sum, factor)" if modulated else f"Identity({term}_sum)"}
        {term}_6d = Unsqueeze({term}_m, pair_axis)
"""
    if modulated:
        text += """
        mask_shape = Shape(mask)
        dmask = Reshape <allowzero = 1> (dmask_sum, mask_shape)
"""
    text = "pair_axis = Constant <value_ints = [3]> ()" + text
    return f"""{_head(name, inputs, outputs)} {{ {text}
        doffset_6d = Concat <axis = 3> (dy_6d, dx_6d)
        offset_4d = Shape(offset)
        doffset = Reshape <allowzero = 1> (doffset_6d, offset_4d)
        dtable_shape = Concat <axis = 0> (b_dim, G_dim, table_dim, e_dim)
        dtable_4d = Reshape <allowzero = 1> (dtable_4, dtable_shape)
        dpixels = Slice(dtable_4d, zero_dim, pixels_dim, two_dim)
        dsplit = Transpose <perm = [0, 1, 3, 2]> (dpixels)
        x_shape = Shape(x)
        dinput = Reshape <allowzero = 1> (dsplit, x_shape)
    }}"""
