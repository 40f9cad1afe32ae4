"""The functions of `triton.language`, on blocks of all programs at once.

Their semantics are those that the documentation of Triton's language gives; arguments that say how
fast something is done, and not what, are taken and left alone.
"""

import builtins
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import SymFloat, SymInt, Tensor

from fuseport.exporter.shims._triton.blocks import BlockPointer
from fuseport.exporter.shims._triton.memory import Pointer
from fuseport.exporter.shims._triton.reductions import REDUCTIONS
from fuseport.exporter.shims._triton.shapes import (
    SHAPES,
    axis_of,
    both,
    size_of,
    torch_dtype,
    whole,
)
from fuseport.exporter.shims._triton.values import (
    Repeats,
    Unknown,
    Value,
    as_value,
    binary,
    programs,
)

__all__ = ["LANGUAGE", "extreme", "next_power_of_2", "numbers"]


# Programs.


def program_id(axis: Any, **by: Any) -> Value:
    """The place of the program along an axis of the grid."""
    return programs().place(int(axis))


def num_programs(axis: Any, **by: Any) -> Value:
    """How many programs there are along an axis of the grid."""
    return Value(programs().grid[int(axis)], 0)


# Memory.


def load(
    pointer: Any,
    mask: Any = None,
    other: Any = None,
    boundary_check: Any = (),
    padding_option: Any = "",
    **by: Any,
) -> Value:
    """What is at a pointer, `other` where a mask is false."""
    if isinstance(pointer, BlockPointer):
        filled = float("nan") if padding_option == "nan" else 0
        pointer, mask = pointer.pointers(boundary_check)
        other = filled if mask is not None else None
    at = _pointer(pointer)
    return at.memory.load(at.at, _optional(mask), _optional(other))


def store(pointer: Any, value: Any, mask: Any = None, boundary_check: Any = (), **by: Any) -> None:
    """Writes to a pointer where a mask is true."""
    if isinstance(pointer, BlockPointer):
        pointer, mask = pointer.pointers(boundary_check)
    at = _pointer(pointer)
    at.memory.store(at.at, as_value(value), _optional(mask))


def _pointer(pointer: Any) -> Pointer:
    if not isinstance(pointer, Pointer):
        raise Unknown(f"it reads or writes at {pointer!r}, which is no pointer")
    return pointer


def _optional(value: Any) -> Value | None:
    return None if value is None else as_value(value)


def atomic_add(pointer: Any, value: Any, mask: Any = None, *by: Any, **more: Any) -> None:
    """Adds to what is at a pointer; the value before is not given."""
    at = _pointer(pointer)
    at.memory.add(at.at, as_value(value), _optional(mask))


def atomic_max(pointer: Any, value: Any, mask: Any = None, *by: Any, **more: Any) -> None:
    """Replaces what is at a pointer where a value is larger."""
    at = _pointer(pointer)
    at.memory.extreme(at.at, as_value(value), _optional(mask), "amax")


def atomic_min(pointer: Any, value: Any, mask: Any = None, *by: Any, **more: Any) -> None:
    """Replaces what is at a pointer where a value is smaller."""
    at = _pointer(pointer)
    at.memory.extreme(at.at, as_value(value), _optional(mask), "amin")


# Arithmetic.


def cast(
    x: Any, dtype: Any, fp_downcast_rounding: Any = None, bitcast: Any = False, **by: Any
) -> Any:
    """In another dtype; with `bitcast`, the same bits."""
    if isinstance(x, Pointer):
        return x.to(dtype)
    value, wanted = as_value(x), torch_dtype(dtype)
    if bitcast and value.dtype.torch != wanted:
        return Value(value.tensor.view(wanted), value.rank)
    if value.number is not None and wanted.itemsize >= 4:
        return Value(_number(value.number, wanted), value.rank)
    if (
        value.number is None
        and value.linear is not None
        and not wanted.is_floating_point
        and wanted.itemsize >= 4
    ):
        return value
    return Value(value.tensor.to(wanted), value.rank)


def _number(number: Any, dtype: torch.dtype) -> Any:
    if dtype.is_floating_point:
        return torch.sym_float(number) if isinstance(number, SymInt) else float(number)
    if isinstance(number, SymInt | SymFloat):
        return torch.sym_int(number)
    return int(number)


def where(condition: Any, x: Any, y: Any, **by: Any) -> Any:
    """`x` where a condition is true, and `y` elsewhere."""
    if isinstance(x, Pointer) and isinstance(y, Pointer) and x.memory is y.memory:
        return Pointer(x.memory, where(condition, x.at, y.at))
    if as_value(condition).number is not None:
        return as_value(x if size_of(condition) else y)
    rank = max(as_value(v).rank for v in (condition, x, y))
    kept = as_value(condition).at_rank(rank).tensor.to(torch.bool)
    a, b = _weak(x, rank), _weak(y, rank)
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        a = as_value(x).at_rank(rank).tensor
    return Value(torch.where(kept, a, b), rank)


def _weak(x: Any, rank: int) -> Any:
    return as_value(x).at_rank(rank).tensor if isinstance(x, Value) else x


def clamp(x: Any, min: Any, max: Any, **by: Any) -> Value:
    """Between two numbers or blocks."""
    return binary("minimum", binary("maximum", x, min), max)


def fma(x: Any, y: Any, z: Any, **by: Any) -> Value:
    """`x * y + z`."""
    return binary("add", binary("mul", x, y), z)


def cdiv(x: Any, y: Any, **by: Any) -> Any:
    """`x / y`, rounded up."""
    if not isinstance(x, Value) and not isinstance(y, Value):
        return -(-x // y)
    a, b = as_value(x), as_value(y)
    if a.number is not None and b.number is not None:
        return Value(-(-a.number // b.number), 0)  # n / n is known to be 1 so
    return binary("floordiv", binary("add", a, binary("sub", b, 1)), b)


def next_power_of_2(n: Any, **by: Any) -> Any:
    """The smallest power of 2 that is not below n; of a dynamic n, n itself, which is a size of a
    block as good."""
    number = size_of(n)
    if isinstance(number, SymInt):
        return number
    return 1 << max(0, as_value(number).__index__() - 1).bit_length()


def dot(
    a: Value,
    b: Value,
    acc: Value | None = None,
    input_precision: Any = None,
    allow_tf32: Any = None,
    max_num_imprecise_acc: Any = None,
    out_dtype: Any = torch.float32,
    **by: Any,
) -> Value:
    """A product of matrices, of half numbers in float32; plus another.

    What a GPU computes in TF32 is computed in float32.
    """
    x, y = whole(a), whole(b)
    if x.dtype.is_floating_point:
        x, y = (t.to(torch.float32) if t.dtype.itemsize < 4 else t for t in (x, y))
    else:
        x, y = x.to(torch.int32), y.to(torch.int32)
    out = Value(torch.matmul(x, y), a.rank)
    if acc is not None:
        return binary("add", out, acc)
    wanted = torch_dtype(out_dtype)
    return cast(out, wanted) if out.dtype.is_floating() and wanted.itemsize < 4 else out


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


def _operator(name: str) -> Callable[..., Value]:
    return lambda x, y, **by: binary(name, x, y)


def _absolute(x: Any, **by: Any) -> Value:
    return builtins.abs(as_value(x))


def swizzle2d(i: Any, j: Any, size_i: Any, size_j: Any, size_g: Any, **by: Any) -> Any:
    """Places of a matrix, by columns of groups of `size_g` rows."""
    at = binary("add", binary("mul", i, size_j), j)
    group = binary("mul", size_g, size_j)
    first = binary("mul", binary("floordiv", at, group), size_g)
    rows = binary("minimum", binary("sub", size_i, first), size_g)
    within = binary("mod", at, group)
    new_i = binary("add", first, binary("mod", within, rows))
    return new_i, binary("floordiv", within, rows)


def softmax(x: Value, dim: Any = None, **by: Any) -> Value:
    """Along a dimension, the first by default."""
    axis = axis_of(x, 0 if dim is None else dim)
    return Value(torch.softmax(whole(x), axis), x.rank)


# What changes no value.


def _itself(x: Any, *by: Any, **more: Any) -> Any:
    return x


def _nothing(*args: Any, **by: Any) -> None:
    return None


def static_assert(condition: Any, message: Any = "", **by: Any) -> None:
    """Raises AssertionError unless a condition holds that is known as the kernel is compiled."""
    if not condition:
        raise AssertionError(message)


def numbers(*given: Any, **by: Any) -> Iterator[Value]:
    """`range`, whose numbers are a kernel's own."""
    return (Value(number, 0) for number in static_range(*given))


def static_range(start: Any, stop: Any = None, step: Any = 1, **by: Any) -> Sequence[Any]:
    """Python's range, of constants.

    Raises:
        Repeats: how often it repeats is as dynamic as a dimension.
    """
    bounds = (0, start, step) if stop is None else (start, stop, step)
    first, last, by_ = (as_value(n).uniform("how often a kernel repeats something") for n in bounds)
    if all(isinstance(n, int) for n in (first, last, by_)):
        return range(first, last, by_)
    times = -(-(last - first) // by_)
    if isinstance(times, SymInt):
        if not times.node.expr.is_number:
            raise Repeats(last - first, by_)
        times = int(times)
    return [first + i * by_ for i in range(times)]


def extreme(name: str) -> Callable[..., Any]:
    """Python's `min` or `max`, of blocks as well."""
    plain = getattr(builtins, name)

    def of_any(*args: Any, **by: Any) -> Any:
        if len(args) == 2 and any(isinstance(a, Value | SymInt) for a in args):
            return binary(f"{name}imum", *args)
        return plain(*args, **by)

    return of_any


_NAMES = (
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "sin", "cos", "tan",
    "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc",
    "erfinv", "floor", "ceil", "trunc", "isnan", "isinf", "lgamma", "sigmoid",
)  # fmt: skip
_TORCH = {
    **{name: getattr(torch, name) for name in _NAMES},
    "fast_expf": torch.exp,
    "fast_logf": torch.log,
    "fast_log2f": torch.log2,
    "fast_sinf": torch.sin,
    "fast_cosf": torch.cos,
    "fast_tanhf": torch.tanh,
    "sqrt_rn": torch.sqrt,
    "rsqrt_rn": torch.rsqrt,
    "rcp_rn": torch.reciprocal,
    "rint": torch.round,
    "nearbyint": torch.round,
    "isfinited": torch.isfinite,
    "finitef": torch.isfinite,
}
_PAIRS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "pow": torch.pow,
    "fast_powf": torch.pow,
    "atan2": torch.atan2,
    "copysign": torch.copysign,
    "hypot": torch.hypot,
    "fmod": torch.fmod,
    "fdim": _positive_part,
}
_OPERATORS = {
    "maximum": "maximum",
    "minimum": "minimum",
    "fmax": "maximum",
    "fmin": "minimum",
    "add": "add",
    "sub": "sub",
    "mul": "mul",
    "fdiv": "truediv",
    "div_rn": "truediv",
    "fast_dividef": "truediv",
    "fast_fdividef": "truediv",
}
_ITSELF = ("multiple_of", "max_contiguous", "max_constancy", "constexpr", "constexpr_function")
_NOTHING = ("debug_barrier", "device_assert", "device_print", "static_print", "assume")

_OWN = (
    program_id, num_programs, load, store, atomic_add, atomic_max, atomic_min, cast, where, clamp,
    fma, cdiv, next_power_of_2, dot, softmax, swizzle2d, static_assert, static_range,
)  # fmt: skip

LANGUAGE: dict[str, Any] = {
    **{function.__name__: function for function in _OWN},
    **{name: _elementwise(function) for name, function in _TORCH.items()},
    **{name: _pair(function) for name, function in _PAIRS.items()},
    **{name: _operator(own) for name, own in _OPERATORS.items()},
    **SHAPES,
    **REDUCTIONS,
    **dict.fromkeys(_ITSELF, _itself),
    **dict.fromkeys(_NOTHING, _nothing),
    "abs": _absolute,
    "fabs": _absolute,
    "fmaf": fma,
    "to": cast,
    "range": numbers,
    "pointer_type": lambda dtype, *by: dtype,
    "make_block_ptr": BlockPointer.made,
    "advance": lambda pointer, offsets, **by: pointer.advanced(offsets),
    "make_tensor_descriptor": BlockPointer.described,
}
"""By name, functions of `triton.language` and of its libraries of mathematics."""
