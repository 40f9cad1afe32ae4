"""The loss and its backward as ONNX: nodes of domain `fuseport.ops`, with function bodies.

Bodies use operators that opset 18 has, and that onnx's reference evaluator has too. The attribute
`compute_type` of a node is the type that it computes in: 1 for float32, 11 for float64. The label
smoothing is smoothing_mantissa·2^smoothing_exponent, since an attribute that is a float would round
it to float32. Standard ONNX has `SoftmaxCrossEntropyLoss`, without smoothing or a gradient.

A target that is neither a class nor ignored becomes an index beyond the last: runtimes refuse it.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from onnx import FunctionProto
from torch import Tensor

from fuseport.ops.onnx_bodies import DOMAIN, VERSION, parsed
from fuseport.ops.rms_norm.shapes import wide

__all__ = ["DOMAIN", "VERSION", "decompositions", "functions"]


def decompositions() -> dict[str, Callable[..., Any]]:
    """For each operator of the op, by name, its form as one symbolic ONNX node."""
    return {"softmax_cross_entropy": _loss, "softmax_cross_entropy_backward": _backward}


def functions(opset: int) -> list[FunctionProto]:
    """The bodies of the nodes, in standard operators of `opset`, 18 or later."""
    return parsed((_FORWARD, _BACKWARD), opset)


def _loss(
    logits: Tensor, targets: Tensor, ignore_index: int, label_smoothing: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows, dtype = logits.shape[:1], wide(logits.dtype)
    losses = torch.onnx.ops.symbolic(
        f"{DOMAIN}::softmax_cross_entropy",
        (logits, targets),
        _attributes(dtype, ignore_index, label_smoothing),
        dtype=dtype,
        shape=rows,
        version=VERSION,
    )
    # Only the backward node of torch reads what is saved; the ONNX one has no use for it.
    return losses, logits.new_zeros(rows, dtype=dtype), logits.new_zeros(rows, dtype=dtype)


def _backward(
    dlosses: Tensor,
    logits: Tensor,
    targets: Tensor,
    largest: Tensor,
    total: Tensor,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    return torch.onnx.ops.symbolic(
        f"{DOMAIN}::softmax_cross_entropy_backward",
        (dlosses, logits, targets),
        _attributes(dlosses.dtype, ignore_index, label_smoothing),
        dtype=logits.dtype,
        shape=logits.shape,
        version=VERSION,
    )


def _attributes(dtype: torch.dtype, ignore_index: int, label_smoothing: float) -> dict[str, Any]:
    mantissa, exponent = math.frexp(label_smoothing)
    return {
        "compute_type": 11 if dtype == torch.float64 else 1,
        "ignore_index": ignore_index,
        "smoothing_mantissa": int(mantissa * 2**53),
        "smoothing_exponent": exponent - 53,
    }


_SHARED = """
        mantissa_int = Constant <value_int: int = @smoothing_mantissa> ()
        mantissa = Cast <to = 11> (mantissa_int)
        exponent_int = Constant <value_int: int = @smoothing_exponent> ()
        exponent = Cast <to = 11> (exponent_int)
        two_float = Constant <value_float = 2.0> ()
        two = Cast <to = 11> (two_float)
        power = Pow(two, exponent)
        smoothing_double = Mul(mantissa, power)
        smoothing = Cast <to: int = @compute_type> (smoothing_double)
        one_float = Constant <value_float = 1.0> ()
        one_double = Cast <to = 11> (one_float)
        sharp_double = Sub(one_double, smoothing_double)
        sharp = Cast <to: int = @compute_type> (sharp_double)
        one = Cast <to: int = @compute_type> (one_float)
        zero = Sub(one, one)

        x = Cast <to: int = @compute_type> (logits)
        last = Constant <value_ints = [1]> ()
        largest = ReduceMax <keepdims = 1> (x, last)
        z = Sub(x, largest)
        powers = Exp(z)
        total = ReduceSum <keepdims = 1> (powers, last)

        zero_index = Constant <value_int = 0> ()
        classes = Shape <start = 1> (logits)
        ignored_index = Constant <value_int: int = @ignore_index> ()
        column = Unsqueeze(targets, last)
        ignored = Equal(column, ignored_index)
        negative = Less(column, zero_index)
        class_or_beyond = Where(negative, classes, column)
        index = Where(ignored, zero_index, class_or_beyond)
"""

_FORWARD = f""" softmax_cross_entropy
    <compute_type, ignore_index, smoothing_mantissa, smoothing_exponent>
    (logits, targets) => (losses) {{
        {_SHARED}
        log_total = Log(total)
        chosen = GatherElements <axis = 1> (z, index)
        sharp_part = Mul(sharp, chosen)
        mean = ReduceMean <keepdims = 1> (z, last)
        smooth_mean = Mul(smoothing, mean)
        smooth = Greater(smoothing, zero)
        smooth_part = Where(smooth, smooth_mean, zero)
        aim = Add(sharp_part, smooth_part)
        difference = Sub(log_total, aim)
        counted = Where(ignored, zero, difference)
        losses = Squeeze(counted, last)
    }}"""

_BACKWARD = f""" softmax_cross_entropy_backward
    <compute_type, ignore_index, smoothing_mantissa, smoothing_exponent>
    (dlosses, logits, targets) => (dlogits) {{
        {_SHARED}
        softmax = Div(powers, total)
        count = Squeeze(classes)
        one_index = Constant <value_int = 1> ()
        all_classes = Range(zero_index, count, one_index)
        is_target = Equal(index, all_classes)
        sharp_part = Where(is_target, sharp, zero)
        classes_real = Cast <to: int = @compute_type> (classes)
        smooth_part = Div(smoothing, classes_real)
        aim = Add(sharp_part, smooth_part)
        difference = Sub(softmax, aim)
        dlosses_column = Unsqueeze(dlosses, last)
        gradient = Mul(dlosses_column, difference)
        counted = Where(ignored, zero, gradient)
        dlogits = CastLike(counted, logits)
    }}"""
