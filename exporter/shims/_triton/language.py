"""The functions of `triton.language`, on blocks of all programs at once.

Their semantics are those that the documentation of Triton's language gives; arguments that say how
fast something is done, and not what, are taken and left alone.
"""

import builtins
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import SymFloat, SymInt, Tensor

from fuseport.exporter.shims._triton.atomics import ATOMICS
from fuseport.exporter.shims._triton.blocks import BlockPointer
from fuseport.exporter.shims._triton.functions import FUNCTIONS
from fuseport.exporter.shims._triton.memory import Pointer, optional, pointer_of
from fuseport.exporter.shims._triton.places import same
from fuseport.exporter.shims._triton.programs import Repeats, Strides, Unknown, programs
from fuseport.exporter.shims._triton.random import RANDOM
from fuseport.exporter.shims._triton.reductions import REDUCTIONS
from fuseport.exporter.shims._triton.shapes import (
    SHAPES,
    axis_of,
    size_of,
    torch_dtype,
    whole,
)
from fuseport.exporter.shims._triton.values import Value, as_value, binary, place_of

__all__ = ["LANGUAGE", "Numbers", "extreme", "next_power_of_2", "numbers", "strided"]


# Programs.


class _Start(Value):
    """The number of a program along an axis, or how many there are, as a loop may begin and step.

    Args:
        of: the number; where there is a program for each turn of such a loop, none.
        axis: of the grid.
    """

    def __init__(self, of: Any, axis: int) -> None:
        if of is not None:
            self.of = of
        self.rank, self.axis = 0, axis

    def __getattr__(self, name: str) -> Any:
        if name == "of":
            raise Unknown("the number of a program is more to it than where its loop begins")
        return super().__getattr__(name)


def program_id(axis: Any, **by: Any) -> Value:
    """The place of the program along an axis of the grid."""
    number = int(axis)
    return _Start(None if programs().strided.get(number) else place_of(number).of, number)


def num_programs(axis: Any, **by: Any) -> Value:
    """How many programs there are along an axis of the grid."""
    number = int(axis)
    here = programs()
    return _Start(None if here.strided.get(number) else here.grid[number], number)


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
    at = pointer_of(pointer)
    return at.memory.load(at.at, optional(mask), optional(other))


def store(pointer: Any, value: Any, mask: Any = None, boundary_check: Any = (), **by: Any) -> None:
    """Writes to a pointer where a mask is true."""
    if isinstance(pointer, BlockPointer):
        pointer, mask = pointer.pointers(boundary_check)
    at = pointer_of(pointer)
    at.memory.store(at.at, as_value(value), optional(mask))


# Arithmetic.


def cast(
    x: Any, dtype: Any, fp_downcast_rounding: Any = None, bitcast: Any = False, **by: Any
) -> Any:
    """In another dtype; with `bitcast`, the same bits."""
    if isinstance(x, Pointer):
        return x.to(dtype)
    value, wanted = as_value(x), torch_dtype(dtype)
    if fp_downcast_rounding not in (None, "rtne"):
        raise Unknown(f"numbers are rounded by {fp_downcast_rounding!r}")
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
    made = Value(value.tensor.to(wanted), value.rank)
    if value.dtype.is_int() and wanted.itemsize >= value.dtype.torch.itemsize:
        made.limits = value.limits
    return made


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
    trans_a: Any = False,
    trans_b: Any = False,
    **by: Any,
) -> Value:
    """A product of matrices, of half numbers in float32; plus another.

    What a GPU computes in TF32 is computed in float32. Triton transposed them itself until 2.1.
    """
    if isinstance(acc, bool):
        raise Unknown("a product with options by their places, as Triton had them until 2.1")
    x, y = (whole(m).mT if turned else whole(m) for m, turned in ((a, trans_a), (b, trans_b)))
    if x.dtype.is_floating_point:
        x, y = (t.to(torch.float32) if t.dtype.itemsize < 4 else t for t in (x, y))
    else:
        x, y = x.to(torch.int32), y.to(torch.int32)
    out = Value(torch.matmul(x, y), a.rank)
    if acc is not None:
        return binary("add", out, acc)
    wanted = torch_dtype(out_dtype)
    return cast(out, wanted) if out.dtype.is_floating() and wanted.itemsize < 4 else out


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


class Numbers:
    """`range`, whose numbers are a kernel's own.

    Args:
        bounds: where it begins and stops, and its step.
    """

    def __init__(self, *bounds: Any) -> None:
        self.bounds = bounds

    def __iter__(self) -> Iterator[Value]:
        return (Value(number, 0) for number in static_range(*self.bounds))


def numbers(start: Any, stop: Any = None, step: Any = 1, **by: Any) -> Numbers:
    """As `range` takes them."""
    return Numbers(0, start, step) if stop is None else Numbers(start, stop, step)


def strided(function: Callable[..., Any], first: Any, stop: Any, step: Any, **by: Any) -> Any:
    """A range of a loop whose turns have nothing in common.

    Args:
        function: that makes the range.
        first, stop, step: of it.

    Raises:
        Strides: it goes from the number of the program by how many there are.
    """
    here = programs()
    if function is not numbers or not isinstance(first, _Start):
        return function(first, stop, step, **by)
    axis = first.axis
    if axis not in here.strided:
        over, count = as_value(stop).number, as_value(step).number
        known = isinstance(over, SymInt) or (type(over) is int and over > 0)
        if known and axis not in here.joined and same(count, here.grid[axis]):
            raise Strides(axis, over, count)
        return function(first, stop, step, **by)
    if (found := here.strided[axis]) is None:
        return function(first, stop, step, **by)
    over, count = found
    steps = step.axis == axis if isinstance(step, _Start) else same(as_value(step).number, count)
    if not steps or not same(as_value(stop).number, over):
        raise Unknown(f"its loops from the number of the program along axis {axis} are not alike")
    return [place_of(axis)]


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


_OPERATORS = {
    "maximum": "maximum",
    "minimum": "minimum",
    "fmax": "maximum",
    "fmin": "minimum",
    "add": "add",
    "add_rn": "add",
    "sub": "sub",
    "sub_rn": "sub",
    "mul": "mul",
    "mul_rn": "mul",
    "fdiv": "truediv",
    "div_rn": "truediv",
    "fast_dividef": "truediv",
    "fast_fdividef": "truediv",
}
_ITSELF = ("multiple_of", "max_contiguous", "max_constancy", "constexpr", "constexpr_function")
_NOTHING = (
    "debug_barrier", "device_assert", "device_print", "static_print", "assume", "gdc_wait",
    "gdc_launch_dependents",
)  # fmt: skip

_OWN = (
    program_id, num_programs, load, store, cast, where, clamp, fma, cdiv, next_power_of_2, dot,
    softmax, swizzle2d, static_assert, static_range,
)  # fmt: skip

LANGUAGE: dict[str, Any] = {
    **{function.__name__: function for function in _OWN},
    **ATOMICS,
    **FUNCTIONS,
    **{name: _operator(own) for name, own in _OPERATORS.items()},
    **SHAPES,
    **REDUCTIONS,
    **RANDOM,
    **dict.fromkeys(_ITSELF, _itself),
    **dict.fromkeys(_NOTHING, _nothing),
    "abs": _absolute,
    "fabs": _absolute,
    "fmaf": fma,
    "fma_rn": fma,
    "to": cast,
    "range": numbers,
    "pointer_type": lambda dtype, *by: dtype,
    "make_block_ptr": BlockPointer.made,
    "advance": lambda pointer, offsets, **by: pointer.advanced(offsets),
    "make_tensor_descriptor": BlockPointer.described,
    "load_tensor_descriptor": lambda pointer, offsets, **by: pointer.load(offsets),
    "store_tensor_descriptor": lambda pointer, offsets, value, **by: pointer.store(offsets, value),
    "tensor": Value,
    "tensor_descriptor": BlockPointer,
}
"""By name, functions of `triton.language` and of its libraries of mathematics."""
