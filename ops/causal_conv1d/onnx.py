"""The convolution and its backward as ONNX: nodes of domain `fuseport.ops`, with function bodies.

The bodies know nothing of dtypes: they compute in the dtype of weight and bias, which the
decompositions make float32 for half types. One text serves every width: `Scan` goes over the taps,
of which there is at least one; each takes a slice of the inputs.
"""

from collections.abc import Callable
from typing import Any

import torch
from onnx import FunctionProto
from torch import Tensor

from fuseport.ops.onnx_bodies import DOMAIN, VERSION, parsed

__all__ = ["DOMAIN", "VERSION", "decompositions", "functions"]


def decompositions() -> dict[str, Callable[..., Any]]:
    """For each operator of the op, by name, its form as one symbolic ONNX node."""
    return {
        "causal_conv1d": _conv,
        "causal_conv1d_packed": _packed,
        "causal_conv1d_backward": _conv_backward,
        "causal_conv1d_packed_backward": _packed_backward,
    }


def functions(opset: int) -> list[FunctionProto]:
    """The bodies of the nodes, in standard operators of `opset`, 18 or later."""
    texts = [_forward_text(False), _forward_text(True), _backward_text(False), _backward_text(True)]
    return parsed(texts, opset)


def _conv(
    x: Tensor, weight: Tensor, bias: Tensor, initial_states: Tensor, silu: bool
) -> tuple[Tensor, ...]:
    return _forward_node("causal_conv1d", x, weight, bias, initial_states, silu)


def _packed(
    x: Tensor, weight: Tensor, bias: Tensor, seq_idx: Tensor, silu: bool
) -> tuple[Tensor, ...]:
    return _forward_node("causal_conv1d_packed", x, weight, bias, seq_idx, silu)


def _conv_backward(
    dout: Tensor,
    dfinal_states: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    initial_states: Tensor,
    silu: bool,
) -> tuple[Tensor, ...]:
    inputs = (dout, dfinal_states, x, weight, bias, initial_states)
    return _backward_node("causal_conv1d_backward", inputs, 4, silu)


def _packed_backward(
    dout: Tensor,
    dfinal_states: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    seq_idx: Tensor,
    silu: bool,
) -> tuple[Tensor, ...]:
    inputs = (dout, dfinal_states, x, weight, bias, seq_idx)
    return _backward_node("causal_conv1d_packed_backward", inputs, 3, silu)


def _forward_node(
    name: str, x: Tensor, weight: Tensor, bias: Tensor, last: Tensor, silu: bool
) -> tuple[Tensor, ...]:
    wide = _wide(x)
    return tuple(
        torch.onnx.ops.symbolic_multi_out(
            f"{DOMAIN}::{name}",
            (x, weight.to(wide), bias.to(wide), last),
            {"silu": int(silu)},
            dtypes=(x.dtype, x.dtype),
            shapes=(x.shape, (x.shape[0], x.shape[1], weight.shape[1] - 1)),
            version=VERSION,
        )
    )


def _backward_node(
    name: str, inputs: tuple[Tensor, ...], gradients: int, silu: bool
) -> tuple[Tensor, ...]:
    dout, dfinal_states, x, weight, bias, last = inputs
    wide = _wide(x)
    given = (dout, dfinal_states, x, weight.to(wide), bias.to(wide), last)
    # Gradients come in the order of the inputs they belong to, each in its shape and dtype.
    of = given[2 : 2 + gradients]
    dx, dweight, dbias, *dinitial_states = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::{name}",
        given,
        {"silu": int(silu)},
        dtypes=[t.dtype for t in of],
        shapes=[t.shape for t in of],
        version=VERSION,
    )
    return (dx, dweight.to(weight.dtype), dbias.to(bias.dtype), *dinitial_states)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


# In the texts below: b batch, d channels, l length, W width, h = W - 1. Names that end in _k belong
# to one tap, names that end in _s are sequences of taps.


def _forward_text(packed: bool) -> str:
    name, last = _names("causal_conv1d", packed)
    return (
        f"""{name} <silu> (x, weight, bias, {last}) => (out, final_states) {{"""
        + _PREPARE
        + (_PREPARE_PACKED if packed else _PREPARE_STATES)
        + _convolution(packed)
        + """
        flag = Constant <value_int: int = @silu> ()
        use_silu = Cast <to = 9> (flag)"""
        + _SIGMOID
        + """
        silu_total = Mul(total, sigmoid)
        result = Where(use_silu, silu_total, total)"""
        + ("out_wide = Where(real, result, zero)" if packed else "out_wide = Identity(result)")
        + """
        out = CastLike(out_wide, x)
        past = Constant <value_ints = [9223372036854775807]> ()
        kept = Slice(inputs, length, past, axis_2)"""
        + (_LAST_STEPS + "kept_last = Where(in_last, kept, zero)" if packed else "")
        + f"""
        final_states = CastLike({"kept_last" if packed else "kept"}, x)
        }}"""
    )


def _backward_text(packed: bool) -> str:
    name, last = _names("causal_conv1d", packed, "_backward")
    dlast = "" if packed else ", dinitial_states"
    return (
        f"""{name} <silu> (dout, dfinal_states, x, weight, bias, {last})
        => (dx, dweight, dbias{dlast}) {{"""
        + _PREPARE
        + (_PREPARE_PACKED if packed else _PREPARE_STATES)
        + _convolution(packed)
        + """
        flag = Constant <value_int: int = @silu> ()
        use_silu = Cast <to = 9> (flag)"""
        + _SIGMOID
        + """
        dout_wide = CastLike(dout, weight)
        one_less = Sub(one, sigmoid)
        total_one_less = Mul(total, one_less)
        slope_1 = Add(one, total_one_less)
        slope = Mul(sigmoid, slope_1)
        dactivation = Mul(dout_wide, slope)
        ds_all = Where(use_silu, dactivation, dout_wide)"""
        + ("ds = Where(real, ds_all, zero)" if packed else "ds = Identity(ds_all)")
        + """
        dfinal_wide = CastLike(dfinal_states, weight)
        past = Constant <value_ints = [9223372036854775807]> ()"""
        + (_LAST_STEPS + "dfinal = Where(in_last, dfinal_wide, zero)" if packed else "")
        + f"""
        before = Constant <value_ints = [0]> ()
        length_pad = Concat <axis = 0> (length, before)
        dinputs_0 = Pad({"dfinal" if packed else "dfinal_wide"}, length_pad, zero, axis_2)
        axes_bl = Constant <value_ints = [0, 2]> ()
        dinputs, dweight_s = Scan <
            num_scan_inputs = 2,
            body = tap (sum_k, weight_k, k_k) => (next_k, dweight_k) {{"""
        + _tap(packed)
        + """
            seen_k = Mul(ds, x_k)"""
        + _masked("products_k", "seen_k", packed)
        + """
            dweight_k = ReduceSum <keepdims = 0> (products_k, axes_bl)
            all_k = Mul(ds, weight_k)"""
        + _masked("given_k", "all_k", packed)
        + """
            lag_k = Sub(halo, k_k)
            pads_k = Concat <axis = 0> (k_k, lag_k)
            padded_k = Pad(given_k, pads_k, zero, axis_2)
            next_k = Add(sum_k, padded_k)
        }> (dinputs_0, weight_s, k_s)
        dweight = Transpose <perm = [1, 0]> (dweight_s)
        dbias = ReduceSum <keepdims = 0> (ds, axes_bl)
        dx_wide = Slice(dinputs, halo, past, axis_2)
        dx = CastLike(dx_wide, x)"""
        + (
            ""
            if packed
            else """
        first = Constant <value_ints = [0]> ()
        dinitial_wide = Slice(dinputs, first, halo, axis_2)
        dinitial_states = CastLike(dinitial_wide, x)"""
        )
        + "}"
    )


def _names(name: str, packed: bool, suffix: str = "") -> tuple[str, str]:
    """Of the node, and of its last input."""
    if packed:
        return f"{name}_packed{suffix}", "seq_idx"
    return f"{name}{suffix}", "initial_states"


_PREPARE = """
        zero_float = Constant <value_float = 0.0> ()
        zero = CastLike(zero_float, weight)
        one_float = Constant <value_float = 1.0> ()
        one = CastLike(one_float, weight)
        unit = Constant <value_ints = [1]> ()
        axis_2 = Constant <value_ints = [2]> ()
        column = Constant <value_ints = [-1, 1]> ()
        x_wide = CastLike(x, weight)
        length = Shape <start = 2> (x)
        width = Shape <start = 1> (weight)
        halo = Sub(width, unit)
        channels = Shape <start = 0, end = 1> (weight)
        weight_time = Transpose <perm = [1, 0]> (weight)
        tap_shape = Concat <axis = 0> (width, channels, unit)
        weight_s = Reshape <allowzero = 1> (weight_time, tap_shape)
        start = Constant <value_int = 0> ()
        step = Constant <value_int = 1> ()
        width_0 = Squeeze(width)
        k_flat = Range(start, width_0, step)
        k_s = Reshape(k_flat, column)
"""
"""Weights (W, d, 1), and the number of each tap, (W, 1)."""

_PREPARE_STATES = """
        initial_wide = CastLike(initial_states, weight)
        inputs = Concat <axis = 2> (initial_wide, x_wide)
"""

_PREPARE_PACKED = """
        no_pad = Constant <value_ints = [0]> ()
        halo_pad = Concat <axis = 0> (halo, no_pad)
        inputs = Pad(x_wide, halo_pad, zero, axis_2)
        axis_1 = Constant <value_ints = [1]> ()
        seq = Unsqueeze(seq_idx, axis_1)
        none = Constant <value_int = -1> ()
        no_sequence = CastLike(none, seq_idx)
        seq_inputs = Pad(seq, halo_pad, no_sequence, axis_2)
        zero_int = Constant <value_int = 0> ()
        first_index = CastLike(zero_int, seq_idx)
        padding = Less(seq, first_index)
        real = Not(padding)
"""
"""Inputs, and the sequence that each is of, (b, 1, h + l): -1 before the first."""

_LAST_STEPS = """
        seq_kept = Slice(seq_inputs, length, past, axis_2)
        last_one = Constant <value_ints = [-1]> ()
        seq_last = Slice(seq_inputs, last_one, past, axis_2)
        of_last = Equal(seq_kept, seq_last)
        kept_padding = Less(seq_kept, first_index)
        kept_real = Not(kept_padding)
        in_last = And(of_last, kept_real)
"""

_SIGMOID = """
        minus_total = Neg(total)
        exp_minus_total = Exp(minus_total)
        divisor = Add(one, exp_minus_total)
        sigmoid = Div(one, divisor)
"""


def _tap(packed: bool) -> str:
    """The inputs that a tap sees, (b, d, l), and where they are of the same sequence."""
    text = """
            axis_k = Constant <value_ints = [2]> ()
            end_k = Add(k_k, length)
            x_k = Slice(inputs, k_k, end_k, axis_k)"""
    if not packed:
        return text
    return (
        text
        + """
            seq_k = Slice(seq_inputs, k_k, end_k, axis_k)
            equal_k = Equal(seq_k, seq)
            same_k = And(equal_k, real)"""
    )


def _masked(name: str, value: str, packed: bool) -> str:
    """Names a value of a tap, or zero where the two steps are not of the same sequence."""
    if packed:
        return f"""
            {name} = Where(same_k, {value}, zero)"""
    return f"""
            {name} = Identity({value})"""


def _convolution(packed: bool) -> str:
    """What goes into the activation, `total`, (b, d, l)."""
    return (
        """
        bias_column = Reshape(bias, column)
        x_shape = Shape(x)
        total_0 = Expand(bias_column, x_shape)
        total = Scan <num_scan_inputs = 2, body = taps (sum_k, weight_k, k_k) => (next_k) {"""
        + _tap(packed)
        + """
            all_k = Mul(weight_k, x_k)"""
        + _masked("product_k", "all_k", packed)
        + """
            next_k = Add(sum_k, product_k)
        }> (total_0, weight_s, k_s)"""
    )
