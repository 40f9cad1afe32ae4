"""What a Triton kernel computes with: numbers, and blocks of all programs at once.

A block is a tensor whose first dimensions are the axes of the grid, `program_id` being a place in
one of them; what is the same in all programs has one place there. Its other dimensions are those
that the kernel knows of.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import SymBool, SymFloat, SymInt, Tensor

from fuseport.exporter.shims._sizes import always
from fuseport.exporter.shims._triton.bounds import UNKNOWN, Bounds, between
from fuseport.exporter.shims._triton.dtypes import DType
from fuseport.exporter.shims._triton.places import Linear, Size, is_one, joint
from fuseport.exporter.shims._triton.programs import NotUniform, Repeats, Unknown, programs

__all__ = ["NUMBERS", "Moved", "Value", "Within", "as_value", "binary", "place_of"]


@dataclass(frozen=True)
class Within:
    """Where each of some linear numbers is below 0: a mask.

    Args:
        below: the numbers, of as many dimensions each.
    """

    below: tuple[Linear, ...]

    def tensor(self, device: torch.device) -> Tensor:
        """As bool."""
        return _all([each.tensor(device) < 0 for each in self.below])


def _all(masks: Sequence[Tensor]) -> Tensor:
    out = masks[0]
    for mask in masks[1:]:
        out = out & mask
    return out


NUMBERS = (bool, int, float, SymInt, SymFloat, SymBool)
"""What a kernel may be passed as a number."""


class Moved:
    """What a value is added to by that itself, as a pointer."""


class Value:
    """A number or a block.

    Args:
        of: a number, linear numbers, a mask of such, or a tensor.
        rank: of the block; 0 of a number.
    """

    __hash__ = None  # type: ignore[assignment]
    # Of integers that are a tensor: their bounds; and, of a sum, what in it is a linear function of
    # the places of programs, by its steps along their axes.
    limits: Bounds = UNKNOWN
    steps: tuple[Size, ...] = ()

    def __init__(self, of: Any, rank: int) -> None:
        self.of = of
        self.rank = rank

    # What it is.

    @property
    def number(self) -> Any:
        """Where it is one number in all programs, and known without a tensor: that. Else None."""
        return self.of if isinstance(self.of, NUMBERS) else None

    @property
    def linear(self) -> Linear | None:
        """Where it is that."""
        if isinstance(self.of, Linear):
            return self.of
        if isinstance(self.of, int | SymInt) and not isinstance(self.of, bool):
            return Linear.of(self.of, len(programs().at_once) + self.rank)
        return None

    @property
    def bounds(self) -> Bounds:
        """The smallest and the largest of integers, as far as they are known."""
        linear = self.linear
        return self.limits if linear is None else (linear.first(), linear.last())

    @property
    def tensor(self) -> Tensor:
        """As a tensor of the axes' dimensions and the block's."""
        here = programs()
        if isinstance(self.of, Linear | Within):
            return self.of.tensor(here.device)
        if isinstance(self.of, Tensor):
            return self.of
        dims = [1] * (len(here.at_once) + self.rank)
        return torch.full(dims, self.of, dtype=self.dtype.torch, device=here.device)

    @property
    def sizes(self) -> tuple[Size, ...]:
        """Of the axes and the block, 1 where all are alike."""
        if isinstance(self.of, Linear):
            return self.of.sizes
        if isinstance(self.of, Within):
            out: tuple[Size, ...] = (1,) * (len(programs().at_once) + self.rank)
            for each in self.of.below:
                out = joint(out, each.sizes)
            return out
        if isinstance(self.of, Tensor):
            return tuple(self.of.shape)
        return (1,) * (len(programs().at_once) + self.rank)

    @property
    def shape(self) -> tuple[Size, ...]:
        """Of the block, as the kernel knows it."""
        return self.sizes[len(programs().at_once) :]

    @property
    def dtype(self) -> DType:
        """Of its elements."""
        if isinstance(self.of, Tensor):
            return DType(self.of.dtype)
        if isinstance(self.of, bool | SymBool | Within):
            return DType(torch.bool)
        return DType(torch.float32 if isinstance(self.of, float | SymFloat) else torch.int32)

    type = dtype

    def at_rank(self, rank: int) -> "Value":
        """With dimensions of one place before those of the block."""
        more = rank - self.rank
        return self._with(len(programs().at_once), more) if more > 0 else self

    # What Python asks of it.

    def __bool__(self) -> bool:
        return bool(self.uniform("which way a kernel goes"))

    def __index__(self) -> int:
        found = self.uniform("how often a kernel repeats something")
        if isinstance(found, SymInt):
            raise Repeats(found, 1)
        return int(found)

    def uniform(self, what: str) -> Any:
        """The number that it is in all programs.

        Args:
            what: it is asked for.

        Raises:
            NotUniform: it differs from program to program.
            Unknown: it is a block of numbers.
        """
        if self.number is not None:
            return self.number
        axes = len(programs().at_once)
        sizes = self.sizes
        if not all(map(is_one, sizes[axes:])):
            raise Unknown(f"{what} hangs on a block of {tuple(sizes[axes:])} numbers")
        differ = [a for a, size in zip(programs().at_once, sizes, strict=False) if not is_one(size)]
        if differ:
            raise NotUniform(differ, what)
        if isinstance(self.of, Linear):
            return self.of.base
        if isinstance(self.of, Within):
            known = [always(each.base < 0) for each in self.of.below]
            if all(known):
                return True
            return all(bool(each.base < 0) for each in self.of.below)
        return self.of.item()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        member = programs().members(name)
        return member(self) if name == "T" else partial(member, self)

    def __getitem__(self, item: Any) -> "Value":
        items = item if isinstance(item, tuple) else (item,)
        axes, out, dim = len(programs().at_once), self, 0
        for each in items:
            if each is None:
                out = out._with(axes + dim)
            elif each is Ellipsis:
                dim = out.rank - (len(items) - items.index(Ellipsis) - 1)
                continue
            elif each != slice(None):
                raise Unknown(f"a block is indexed by {each}, where only `:` and None are known")
            dim += 1
        return out

    def _with(self, at: int, more: int = 1) -> "Value":
        """With so many dimensions of one place more, before that number of them."""
        rank = self.rank + more

        def wider(each: Linear) -> Linear:
            steps = (*each.steps[:at], *[0] * more, *each.steps[at:])
            sizes = (*each.sizes[:at], *[1] * more, *each.sizes[at:])
            return Linear(each.base, steps, sizes)

        if isinstance(self.of, Linear):
            return Value(wider(self.of), rank)
        if isinstance(self.of, Within):
            return Value(Within(tuple(map(wider, self.of.below))), rank)
        if isinstance(self.of, Tensor):
            shape = self.of.shape
            made = Value(self.of.reshape([*shape[:at], *[1] * more, *shape[at:]]), rank)
            made.limits, made.steps = self.limits, self.steps
            return made
        return Value(self.of, rank)

    # Arithmetic.

    def __neg__(self) -> "Value":
        if (linear := self.linear) is not None and self.number is None:
            return Value(linear.times(-1), self.rank)
        return Value(-self.of if self.number is not None else -self.tensor, self.rank)

    def __pos__(self) -> "Value":
        return self

    def __invert__(self) -> "Value":
        if isinstance(self.of, bool):
            return Value(not self.of, self.rank)
        if self.number is not None:
            return Value(~self.of, self.rank)
        return Value(~self.tensor, self.rank)

    def __abs__(self) -> "Value":
        return Value(abs(self.of) if self.number is not None else self.tensor.abs(), self.rank)


def place_of(axis: int) -> Value:
    """The number of a program along an axis of the grid."""
    here = programs()
    if axis not in here.at_once:
        return Value(here.here[axis], 0)
    dims = [axis == a for a in here.at_once]
    sizes = tuple(here.grid[axis] if d else 1 for d in dims)
    return Value(Linear(0, tuple(int(d) for d in dims), sizes), 0)


def as_value(value: Any) -> Value:
    """A number of Python's as a value."""
    if isinstance(value, Value):
        return value
    if isinstance(value, NUMBERS):
        return Value(value, 0)
    raise Unknown(f"a kernel computes with {value!r}")


def _divided(a: Any, b: Any) -> Any:
    """Of integers, or of half numbers, in float32, as Triton does."""
    if all(not isinstance(x, Tensor) or x.dtype.itemsize < 4 for x in (a, b)):
        a, b = (x.to(torch.float32) if isinstance(x, Tensor) else x for x in (a, b))
    return a / b


def _as_tensors(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Tensor]:
    """For a function of torch's that takes no numbers: these get the other's dtype."""

    def of_either(a: Any, b: Any) -> Tensor:
        if not isinstance(a, Tensor):
            a = torch.full([], a, dtype=(a * b).dtype, device=b.device)
        elif not isinstance(b, Tensor):
            b = torch.full([], b, dtype=(a * b).dtype, device=a.device)
        return function(a, b)

    return of_either


def _difference(x: Any, y: Any) -> Any:
    """As Triton has it, of masks, too, whose elements are 0 or 1; torch has only sums of these."""
    dtype = torch.result_type(x, y)
    masks = (isinstance(each, Tensor) and each.dtype == torch.bool for each in (x, y))
    x, y = (each.to(dtype) if mask else each for each, mask in zip((x, y), masks, strict=True))
    return x - y


_TENSORS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": _difference,
    "mul": operator.mul,
    "truediv": _divided,
    "floordiv": _as_tensors(partial(torch.div, rounding_mode="trunc")),
    "mod": _as_tensors(torch.fmod),
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "eq": operator.eq,
    "ne": operator.ne,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "lshift": operator.lshift,
    "rshift": operator.rshift,
    "maximum": _as_tensors(torch.maximum),
    "minimum": _as_tensors(torch.minimum),
}


def _toward_zero(a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int) and (a < 0) != (b < 0):
        return -(abs(a) // abs(b))
    return a // b


def _rest(a: Any, b: Any) -> Any:
    return a % b if isinstance(a, SymInt) or isinstance(b, SymInt) else a - b * _toward_zero(a, b)


_NUMERIC: dict[str, Callable[[Any, Any], Any]] = {
    **{name: f for name, f in _TENSORS.items() if getattr(f, "__module__", "") == "_operator"},
    "sub": operator.sub,
    "truediv": operator.truediv,
    "floordiv": _toward_zero,
    "mod": _rest,
    "maximum": lambda a, b: max(a, b) if isinstance(a, int | float) else torch.sym_max(a, b),
    "minimum": lambda a, b: min(a, b) if isinstance(a, int | float) else torch.sym_min(a, b),
}


def binary(name: str, left: Any, right: Any) -> Value:
    """An operator of two values, or of a value and a number of Python's."""
    a, b = as_value(left), as_value(right)
    if a.number is not None and b.number is not None:
        return Value(_NUMERIC[name](a.of, b.of), max(a.rank, b.rank))
    rank = max(a.rank, b.rank)
    a, b = a.at_rank(rank), b.at_rank(rank)
    found = _of_linear(name, a, b)
    if found is not None:
        return Value(found, rank)
    first, second = _alone(a), _alone(b)
    if first is not None and second is not None:
        return Value(_NUMERIC[name](first, second), rank)
    made = Value(_TENSORS[name](*_operands(a, b, left, right)), rank)
    if made.dtype.is_int():
        made.limits = between(name, a.bounds, b.bounds)
        made.steps = _steps(name, a, b)
    return made


def _steps(name: str, a: Value, b: Value) -> tuple[Size, ...]:
    """Of a sum or a difference, along the axes of programs."""
    axes = len(programs().at_once)
    first, second = (
        linear.steps[:axes] if (linear := each.linear) else each.steps or (0,) * axes
        for each in (a, b)
    )
    if name == "add":
        return tuple(x + y for x, y in zip(first, second, strict=True))
    return tuple(x - y for x, y in zip(first, second, strict=True)) if name == "sub" else ()


def _alone(value: Value) -> Any:
    """The number that it is, also as the only one of linear numbers; None of others."""
    if isinstance(value.of, Linear) and all(map(is_one, value.of.sizes)):
        return value.of.base
    return value.number


def _of_linear(name: str, a: Value, b: Value) -> Linear | Within | None:
    """What stays linear, or is a comparison of that."""
    if name == "and" and isinstance(a.of, Within) and isinstance(b.of, Within):
        return Within((*a.of.below, *b.of.below))
    first, second = a.linear, b.linear
    if first is None or second is None:
        return None
    match name:
        case "add":
            return first + second
        case "sub":
            return first + second.times(-1)
        case "mul" if b.number is not None:
            return first.times(b.of)
        case "mul" if a.number is not None:
            return second.times(a.of)
        case "floordiv" if b.number is not None:
            return first.over(b.of)
        case "lt" | "gt":
            less = (first, second) if name == "lt" else (second, first)
            return Within((less[0] + less[1].times(-1),))
        case "le" | "ge":
            less = (first, second) if name == "le" else (second, first)
            difference = less[0] + less[1].times(-1)
            return Within((Linear(difference.base - 1, difference.steps, difference.sizes),))
        case "minimum" | "maximum":
            return _extreme(first, second, largest=name == "maximum")
    return None


def _extreme(first: Linear, second: Linear, *, largest: bool) -> Linear | None:
    """The smaller or larger of two, where that is one of them everywhere, as of what is left of a
    dimension and a block that divides it."""
    difference = first + second.times(-1)
    if always(difference.first() >= 0):
        return first if largest else second
    if always(difference.last() <= 0):
        return second if largest else first
    return None


def _operands(a: Value, b: Value, left: Any, right: Any) -> tuple[Any, Any]:
    """As torch takes them: a number of the code's own has the other's dtype, one that is an
    argument has its own."""
    x, y = _operand(a, b, isinstance(left, Value)), _operand(b, a, isinstance(right, Value))
    return (x, y) if isinstance(x, Tensor) or isinstance(y, Tensor) else (a.tensor, b.tensor)


def _operand(value: Value, other: Value, typed: bool) -> Any:
    if value.number is None:
        return value.tensor
    narrow = other.dtype.torch.itemsize < 4 and other.dtype.torch != torch.bool
    if typed and narrow and (value.dtype.is_floating() or other.dtype.is_int()):
        return value.tensor
    return value.of


def _operators() -> None:
    def normal(name: str) -> Callable[[Value, Any], Any]:
        return lambda self, other: binary(name, self, other) if known(other) else NotImplemented

    def swapped(name: str) -> Callable[[Value, Any], Any]:
        return lambda self, other: binary(name, other, self) if known(other) else NotImplemented

    def known(other: Any) -> bool:
        return not isinstance(other, Moved)

    for name in _TENSORS:
        if name not in ("maximum", "minimum"):
            setattr(Value, f"__{name}__", normal(name))
            setattr(Value, f"__r{name}__", swapped(name))


_operators()
