"""Functions of numbers, as `triton.language` and CUDA's libdevice have them.

Those that tell how a result is rounded give it as torch rounds it, to the nearest.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fuseport.exporter.shims._triton.shapes import both
from fuseport.exporter.shims._triton.values import Value, as_value, binary

__all__ = ["FUNCTIONS", "negated", "truth"]


def truth(x: Any) -> Value:
    """Whether each element of a block is not 0."""
    value = as_value(x)
    return value if value.dtype.torch == torch.bool else binary("ne", value, as_value(0))


def negated(x: Any, **by: Any) -> Value:
    """Whether each element of a block is 0."""
    return ~truth(x)


def _connected(name: str) -> Callable[..., Value]:
    return lambda x, y, **by: binary(name, truth(x), truth(y))


def _elementwise(function: Callable[[Tensor], Tensor]) -> Callable[..., Value]:
    def of_block(x: Any, **by: Any) -> Value:
        value = as_value(x)
        return Value(function(value.tensor), value.rank)

    return of_block


def _pair(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Value]:
    def of_blocks(x: Any, y: Any, **by: Any) -> Value:
        a, b, rank = both(x, y)
        return Value(function(a.tensor, b.tensor), rank)

    return of_blocks


def _positive_part(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).clamp(min=0)


def _away_from_zero(x: Tensor) -> Tensor:
    """To the nearest integer; of two, to the one farther from 0."""
    towards = x.trunc()
    return torch.where((x - towards).abs() >= 0.5, towards + x.sign(), towards)


def _cube_root(x: Tensor) -> Tensor:
    return x.sign() * x.abs().pow(1 / 3)


def _between_0_and_1(x: Tensor) -> Tensor:
    return torch.where(x > 0, x.clamp(max=1), 0)


def _normal_cdf(x: Tensor) -> Tensor:
    return 0.5 * torch.erfc(-x / math.sqrt(2))


def _scaled(x: Tensor, exponent: Tensor) -> Tensor:
    return x * torch.exp2(exponent.to(x.dtype))


def _bits(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.view(dtype)


def _integer(round_: Callable[[Tensor], Tensor], dtype: torch.dtype, x: Tensor) -> Tensor:
    return round_(x).to(dtype)


_NAMES = (
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "sin", "cos", "tan",
    "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc",
    "erfinv", "floor", "ceil", "trunc", "isnan", "isinf", "lgamma", "sigmoid",
)  # fmt: skip
_TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: getattr(torch, name) for name in _NAMES},
    "fast_expf": torch.exp,
    "fast_logf": torch.log,
    "fast_log2f": torch.log2,
    "fast_log10f": torch.log10,
    "fast_sinf": torch.sin,
    "fast_cosf": torch.cos,
    "fast_tanf": torch.tan,
    "fast_tanhf": torch.tanh,
    "exp10": lambda x: torch.pow(10.0, x),
    "cbrt": _cube_root,
    "rcbrt": lambda x: 1 / _cube_root(x),
    "sinpi": lambda x: torch.sin(math.pi * x),
    "cospi": lambda x: torch.cos(math.pi * x),
    "normcdf": _normal_cdf,
    "erfcinv": lambda x: torch.erfinv(1 - x),
    "sqrt_rn": torch.sqrt,
    "rsqrt_rn": torch.rsqrt,
    "rcp_rn": torch.reciprocal,
    "rint": torch.round,
    "nearbyint": torch.round,
    "round": _away_from_zero,
    "llrint": partial(_integer, torch.round, torch.int64),
    "llround": partial(_integer, _away_from_zero, torch.int64),
    "float2int_rn": partial(_integer, torch.round, torch.int32),
    "float2int_rz": partial(_integer, torch.trunc, torch.int32),
    "float2int_rd": partial(_integer, torch.floor, torch.int32),
    "float2int_ru": partial(_integer, torch.ceil, torch.int32),
    "int2float_rn": lambda x: x.to(torch.float32),
    "float_as_int": lambda x: _bits(x.to(torch.float32), torch.int32),
    "int_as_float": lambda x: _bits(x.to(torch.int32), torch.float32),
    "saturatef": _between_0_and_1,
    "isfinited": torch.isfinite,
    "finitef": torch.isfinite,
    "signbit": lambda x: torch.signbit(x).to(torch.int32),
}
_PAIRS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "pow": torch.pow,
    "fast_powf": torch.pow,
    "atan2": torch.atan2,
    "copysign": torch.copysign,
    "hypot": torch.hypot,
    "rhypot": lambda x, y: 1 / torch.hypot(x, y),
    "fmod": torch.fmod,
    "fdim": _positive_part,
    "ldexp": _scaled,
    "scalbn": _scaled,
}

FUNCTIONS: dict[str, Any] = {
    **{name: _elementwise(function) for name, function in _TORCH.items()},
    **{name: _pair(function) for name, function in _PAIRS.items()},
    "logical_and": _connected("and"),
    "logical_or": _connected("or"),
    "logical_not": negated,
}
"""By name, functions of one or two blocks, element by element."""
