"""What the ONNX function bodies of several ops share: their domain, how they are read, and texts.

Names in the texts are values in the body that a text is put into; each text says which it takes and
which it gives. `one` is 1 in the dtype that the body computes in.
"""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnx import FunctionProto

__all__ = [
    "DOMAIN",
    "LINEAR",
    "LINEAR_BACKWARD",
    "SILU",
    "SILU_SLOPE",
    "VERSION",
    "exact_scale",
    "parsed",
    "scale_attributes",
    "softplus",
    "softplus_backward",
]

DOMAIN = "fuseport.ops"
VERSION = 1


def parsed(texts: Iterable[str], opset: int, domain: str = DOMAIN) -> list["FunctionProto"]:
    """Functions from texts `name <attribute> (input) => (output) { … }`, over operators of `opset`.

    Raises:
        onnx.parser.ParseError: a text is none.
    """
    import onnx.parser

    imports = f'<domain: "{domain}", opset_import: ["" : {opset}]>'
    return [onnx.parser.parse_function(f"{imports} {text}") for text in texts]


def scale_attributes(value: float) -> dict[str, Any]:
    """The attributes scale_mantissa and scale_exponent, of scale_mantissa·2^scale_exponent.

    An attribute that is a float would round it to float32. 2^1024 stands for Inf.
    """
    mantissa, exponent = math.frexp(value)
    if not math.isfinite(value):  # 2^1024 is Inf in float64, and 0 times that NaN
        mantissa = 0.0 if math.isnan(value) else math.copysign(2.0**-53, value)
        exponent = 1024 + 53
    return {"scale_mantissa": int(mantissa * 2**53), "scale_exponent": exponent - 53}


def exact_scale(like: str) -> str:
    """`scale` of those attributes, in the dtype of the value `like`."""
    return f"""
        mantissa_int = Constant <value_int: int = @scale_mantissa> ()
        mantissa = Cast <to = 11> (mantissa_int)
        exponent_int = Constant <value_int: int = @scale_exponent> ()
        exponent = Cast <to = 11> (exponent_int)
        two_float = Constant <value_float = 2.0> ()
        two = Cast <to = 11> (two_float)
        power = Pow(two, exponent)
        scale_double = Mul(mantissa, power)
        scale = CastLike(scale_double, {like})
"""


def softplus(flag: str, result: str) -> str:
    """`result` = softplus(raw) if the attribute `flag` is set, else raw; takes `raw` and `one`.

    Identity above 20. log(1 + e) = log(w)·e/(w - 1) with w = 1 + e as rounded, or e where w = 1:
    exact to a few ulps for every e (W. Kahan's formula, in Goldberg, "What every computer scientist
    should know about floating-point arithmetic", 1991, theorem 4). ONNX has no log1p; and its
    Softplus and Sigmoid are computed to an absolute accuracy in some runtimes, where a step size
    far below 1 needs a relative one: hence Exp alone.
    """
    return f"""
        flag = Constant <value_int: int = @{flag}> ()
        softplus = Cast <to = 9> (flag)
        threshold_float = Constant <value_float = 20.0> ()
        threshold = CastLike(threshold_float, one)
        linear = Greater(raw, threshold)
        exp_raw = Exp(raw)
        exp_raw_1 = Add(exp_raw, one)
        tiny = Equal(exp_raw_1, one)
        log_1 = Log(exp_raw_1)
        rounded = Sub(exp_raw_1, one)
        correction = Div(exp_raw, rounded)
        log1p_large = Mul(log_1, correction)
        log1p = Where(tiny, exp_raw, log1p_large)
        softplus_raw = Where(linear, raw, log1p)
        {result} = Where(softplus, softplus_raw, raw)
"""


def softplus_backward(cotangent: str) -> str:
    """`draw`, the gradient of `raw`, from that of what `softplus` gave."""
    return f"""
        sigmoid_raw = Div(exp_raw, exp_raw_1)
        softplus_slope = Where(linear, one, sigmoid_raw)
        dsoftplus = Mul({cotangent}, softplus_slope)
        draw = Where(softplus, dsoftplus, {cotangent})
"""


SILU = """
        minus_z = Neg(z_wide)
        exp_minus_z = Exp(minus_z)
        gate_divisor = Add(one, exp_minus_z)
        sigmoid_z = Div(one, gate_divisor)
        silu_z = Mul(z_wide, sigmoid_z)
"""
"""`silu_z` and `sigmoid_z` of `z_wide`; by Exp alone, as `softplus` is."""

SILU_SLOPE = """
        one_less = Sub(one, sigmoid_z)
        z_one_less = Mul(z_wide, one_less)
        slope_1 = Add(one, z_one_less)
        silu_slope = Mul(sigmoid_z, slope_1)
"""
"""`silu_slope`, the derivative of `silu_z` by `z_wide`."""

LINEAR = """
        transposed = Transpose <perm = [1, 0]> (weight)
        x_wide = CastLike(x, weight)
        bias_wide = CastLike(bias, weight)
        product = MatMul(x_wide, transposed)
        sum = Add(product, bias_wide)
        out = CastLike(sum, x)
"""
"""`out` of `x`, `bias` and `weight`, (out_features, in_features), in whose dtype it is computed."""

LINEAR_BACKWARD = """
        dout_wide = CastLike(dout, weight)
        dx_wide = MatMul(dout_wide, weight)
        dx = CastLike(dx_wide, dout)
        dout_size = Shape <start = -1> (dout)
        any_rows = Constant <value_ints = [-1]> ()
        matrix = Concat <axis = 0> (any_rows, dout_size)
        dout_rows = Reshape(dout_wide, matrix)
        leading = Constant <value_ints = [0]> ()
        dbias_wide = ReduceSum <keepdims = 0> (dout_rows, leading)
        dbias = CastLike(dbias_wide, dout)
"""
"""`dx` and `dbias` of `dout` and `weight`."""
