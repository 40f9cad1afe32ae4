"""Correlation and its backward as ONNX: nodes of domain `fuseport.ops`, with function bodies.

Nodes are of float32 or float64, their dtype of computation; the decompositions cast around them.
Their attributes are the operator's options. Bodies take one displacement after another, with
`Scan` as onnx's reference evaluator has it, along axis 0 and forward: what all displacements at
once would multiply is larger than the images by their number. Windows are sums of gathered rows and
columns, of which one more is zero; they are centred where pixels of the first image are.
"""

from collections.abc import Callable
from typing import Any

import torch
from onnx import FunctionProto
from torch import Tensor

from fuseport.ops.correlation.shapes import Options, check
from fuseport.ops.onnx_bodies import DOMAIN, VERSION, parsed

__all__ = ["DOMAIN", "VERSION", "decompositions", "functions"]


def decompositions() -> dict[str, Callable[..., Any]]:
    """For each operator of the op, by name, its form as one symbolic ONNX node."""
    return {"correlation": _forward_node, "correlation_backward": _backward_node}


def functions(opset: int) -> list[FunctionProto]:
    """The bodies of the nodes, in standard operators of `opset`, 18 or later."""
    return parsed((_FORWARD, _BACKWARD), opset)


def _forward_node(x1: Tensor, x2: Tensor, *given: int) -> Tensor:
    options = Options(*given)
    (out,) = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::correlation",
        (_wide(x1), _wide(x2)),
        options._asdict(),
        dtypes=(_wide(x1).dtype,),
        shapes=(check("correlation", x1, x2, options),),
        version=VERSION,
    )
    return _like(out, x1)


def _backward_node(dout: Tensor, x1: Tensor, x2: Tensor, *given: int) -> tuple[Tensor, ...]:
    gradients = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::correlation_backward",
        (_wide(dout), _wide(x1), _wide(x2)),
        Options(*given)._asdict(),
        dtypes=[_wide(x1).dtype] * 2,
        shapes=[x1.shape, x2.shape],
        version=VERSION,
    )
    return tuple(_like(gradient, x1) for gradient in gradients)


def _wide(t: Tensor) -> Tensor:
    return t if t.dtype in (torch.float32, torch.float64) else t.float()


def _like(t: Tensor, other: Tensor) -> Tensor:
    return t if t.dtype == other.dtype else t.to(other.dtype)


# In the texts below: x1 and x2 are (b, c, H, W). Along an axis a, h or w, the first displacement
# goes `low_a` pixels back, the last one `high_a` pixels on: margins of x2; of x1, the other way.
# All names that end in _dim are tensors of one integer.


def _axis(a: str, size: str) -> str:
    """Along one axis: margins, outputs, and the pixels of their windows, (outputs, taps)."""
    options = ("kernel", "patch", "stride", "padding", "dilation", "dilation_patch")
    text = "".join(
        f"""
        {name}_{a}_i = Constant <value_int: int = @{name}_{a}> ()
        {name}_{a}_dim = Reshape({name}_{a}_i, one_dim)"""
        for name in options
    )
    return (
        text
        + f"""
        last_{a}_dim = Sub(patch_{a}_dim, one_dim)
        before_{a}_dim = Div(last_{a}_dim, two_dim)
        after_{a}_dim = Sub(last_{a}_dim, before_{a}_dim)
        low_{a}_dim = Mul(before_{a}_dim, dilation_patch_{a}_dim)
        high_{a}_dim = Mul(after_{a}_dim, dilation_patch_{a}_dim)
        padding_both_{a}_dim = Mul(padding_{a}_dim, two_dim)
        padded_{a}_dim = Add({size}, padding_both_{a}_dim)
        last_tap_{a}_dim = Sub(kernel_{a}_dim, one_dim)
        window_{a}_dim = Mul(last_tap_{a}_dim, dilation_{a}_dim)
        free_{a}_dim = Sub(padded_{a}_dim, window_{a}_dim)
        free_1_{a}_dim = Sub(free_{a}_dim, one_dim)
        strides_{a}_dim = Div(free_1_{a}_dim, stride_{a}_dim)
        outputs_{a}_dim = Add(strides_{a}_dim, one_dim)
        outputs_{a}_i = Squeeze(outputs_{a}_dim)
        outputs_{a} = Range(zero_i, outputs_{a}_i, one_i)
        taps_{a} = Range(zero_i, kernel_{a}_i, one_i)
        strided_{a} = Mul(outputs_{a}, stride_{a}_i)
        begins_{a} = Sub(strided_{a}, padding_{a}_i)
        dilated_{a} = Mul(taps_{a}, dilation_{a}_i)
"""
    )


def _windows(a: str, size: str) -> str:
    """`pixels_a`, (outputs, taps); `size` stands for what is outside."""
    return f"""
        begins_{a}_2d = Unsqueeze(begins_{a}, one_dim)
        raw_{a} = Add(begins_{a}_2d, dilated_{a})
        minus_{a} = Less(raw_{a}, zero_dim)
        beyond_{a} = GreaterOrEqual(raw_{a}, {size})
        outside_{a} = Or(minus_{a}, beyond_{a})
        pixels_{a} = Where(outside_{a}, {size}, raw_{a})
"""


def _reached(a: str, size: str) -> str:
    """`sources_a`, (pixels, taps): the outputs a pixel is in; their number for none."""
    return f"""
        size_{a}_i = Squeeze({size})
        every_{a} = Range(zero_i, size_{a}_i, one_i)
        every_{a}_2d = Unsqueeze(every_{a}, one_dim)
        moved_{a} = Add(every_{a}_2d, padding_{a}_i)
        from_{a} = Sub(moved_{a}, dilated_{a})
        whole_{a} = Div(from_{a}, stride_{a}_i)
        back_{a} = Mul(whole_{a}, stride_{a}_i)
        exact_{a} = Equal(back_{a}, from_{a})
        least_{a} = GreaterOrEqual(from_{a}, zero_dim)
        most_{a} = Less(whole_{a}, outputs_{a}_dim)
        bounded_{a} = And(least_{a}, most_{a})
        there_{a} = And(bounded_{a}, exact_{a})
        sources_{a} = Where(there_{a}, whole_{a}, outputs_{a}_dim)
"""


_PREPARE = f"""
        b_dim = Shape <start = 0, end = 1> (x1)
        H_dim = Shape <start = 2, end = 3> (x1)
        W_dim = Shape <start = 3, end = 4> (x1)
        size = Shape <start = 2> (x1)
        zero_dim = Constant <value_ints = [0]> ()
        one_dim = Constant <value_ints = [1]> ()
        two_dim = Constant <value_ints = [2]> ()
        zero_i = Constant <value_int = 0> ()
        one_i = Constant <value_int = 1> ()
        zero_float = Constant <value_float = 0.0> ()
        zero = CastLike(zero_float, x1)
        one_float = Constant <value_float = 1.0> ()
        {_axis("h", "H_dim")}
        {_axis("w", "W_dim")}
        image_axes = Constant <value_ints = [2, 3]> ()
        plane_axes = Constant <value_ints = [0, 1]> ()
        patch_rows = Range(zero_i, patch_h_i, one_i)
        patch_columns = Range(zero_i, patch_w_i, one_i)
        rows_moved = Mul(patch_rows, dilation_patch_h_i)
        columns_moved = Mul(patch_columns, dilation_patch_w_i)
        rows_2d = Unsqueeze(rows_moved, one_dim)
        patch_size = Concat <axis = 0> (patch_h_dim, patch_w_dim)
        rows_of_all = Expand(rows_2d, patch_size)
        columns_of_all = Expand(columns_moved, patch_size)
        rows_last = Unsqueeze(rows_of_all, two_dim)
        columns_last = Unsqueeze(columns_of_all, two_dim)
        shifts_3d = Concat <axis = 2> (rows_last, columns_last)
        list_of_pairs = Constant <value_ints = [-1, 2]> ()
        shifts = Reshape(shifts_3d, list_of_pairs)
        margins_2 = Concat <axis = 0> (low_h_dim, low_w_dim, high_h_dim, high_w_dim)
        x2_wide = Pad(x2, margins_2, zero, image_axes)
        ones = Expand(one_float, size)
        zero_margin = Constant <value_float = 0.0> ()
        known = Pad(ones, margins_2, zero_margin, plane_axes)
"""
"""`shifts`, (ph·pw, 2), of displacements in `x2_wide`; `known` is 1 where that is inside of x2."""

_FORWARD = (
    f"correlation <{', '.join(Options._fields)}> (x1, x2) => (out) {{ {_PREPARE}"
    + _windows("h", "H_dim")
    + _windows("w", "W_dim")
    + """
        one_more = Constant <value_ints = [0, 0, 0, 0, 1, 1]> ()
        axis_3 = Constant <value_ints = [3]> ()
        volume = Scan <num_scan_inputs = 1, body = step (shift) => (sums) {
            end = Add(shift, size)
            moved = Slice(x2_wide, shift, end, image_axes)
            inside_number = Slice(known, shift, end, plane_axes)
            inside = Cast <to = 9> (inside_number)
            products_c = Mul(x1, moved)
            products_all = ReduceSum <keepdims = 0> (products_c, one_dim)
            products = Where(inside, products_all, zero)
            bordered = Pad(products, one_more, zero)
            rows_taken = Gather <axis = 1> (bordered, pixels_h)
            rows_summed = ReduceSum <keepdims = 0> (rows_taken, two_dim)
            columns_taken = Gather <axis = 2> (rows_summed, pixels_w)
            sums = ReduceSum <keepdims = 0> (columns_taken, axis_3)
        }> (shifts)
        batch_first = Transpose <perm = [1, 0, 2, 3]> (volume)
        out_shape = Concat <axis = 0> (b_dim, patch_size, outputs_h_dim, outputs_w_dim)
        out = Reshape <allowzero = 1> (batch_first, out_shape)
    }"""
)

_BACKWARD = (
    f"correlation_backward <{', '.join(Options._fields)}> (dout, x1, x2) "
    f"=> (dinput1, dinput2) {{ {_PREPARE}"
    + _reached("h", "H_dim")
    + _reached("w", "W_dim")
    + """
        margins_1 = Concat <axis = 0> (high_h_dim, high_w_dim, low_h_dim, low_w_dim)
        x1_wide = Pad(x1, margins_1, zero, image_axes)
        reach_h_dim = Mul(last_h_dim, dilation_patch_h_dim)
        reach_w_dim = Mul(last_w_dim, dilation_patch_w_dim)
        reach = Concat <axis = 0> (reach_h_dim, reach_w_dim)
        outputs_dim = Concat <axis = 0> (outputs_h_dim, outputs_w_dim)
        patch_dim = Mul(patch_h_dim, patch_w_dim)
        dvolume_shape = Concat <axis = 0> (b_dim, patch_dim, outputs_dim)
        dvolume_b = Reshape <allowzero = 1> (dout, dvolume_shape)
        dvolume = Transpose <perm = [1, 0, 2, 3]> (dvolume_b)
        one_more = Constant <value_ints = [0, 0, 0, 0, 1, 1]> ()
        axis_3 = Constant <value_ints = [3]> ()
        image_axes_3d = Constant <value_ints = [1, 2]> ()
        image_shape = Shape(x1)
        none = Expand(zero, image_shape)
        dinput1, dinput2 = Scan <
            num_scan_inputs = 2,
            body = step (dx1, dx2, shift, dsums) => (dx1_next, dx2_next) {
            end = Add(shift, size)
            moved = Slice(x2_wide, shift, end, image_axes)
            inside_number = Slice(known, shift, end, plane_axes)
            inside = Cast <to = 9> (inside_number)
            bordered = Pad(dsums, one_more, zero)
            rows_taken = Gather <axis = 1> (bordered, sources_h)
            rows_summed = ReduceSum <keepdims = 0> (rows_taken, two_dim)
            columns_taken = Gather <axis = 2> (rows_summed, sources_w)
            spread = ReduceSum <keepdims = 0> (columns_taken, axis_3)
            g_plane = Where(inside, spread, zero)
            g = Unsqueeze(g_plane, one_dim)
            given_1 = Mul(g, moved)
            dx1_next = Add(dx1, given_1)
            back = Sub(reach, shift)
            back_end = Add(back, size)
            x1_moved = Slice(x1_wide, back, back_end, image_axes)
            g_wide = Pad(g_plane, margins_1, zero, image_axes_3d)
            g_moved_plane = Slice(g_wide, back, back_end, image_axes_3d)
            g_moved = Unsqueeze(g_moved_plane, one_dim)
            given_2 = Mul(g_moved, x1_moved)
            dx2_next = Add(dx2, given_2)
        }> (none, none, shifts, dvolume)
    }"""
)
