"""Integers that are a linear function of the place in a block, as most of a kernel's offsets are.

They are no tensors until one is needed: memory that they point at can be read as a view of it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy  # type: ignore[import-untyped]  # it has no types
import torch
from torch import Tensor
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from fuseport.exporter.shims._sizes import always

__all__ = ["Linear", "Size", "at_least", "is_one", "joint", "same", "strides", "times"]

Size = Any
"""An int, or a `SymInt` where a dimension is dynamic."""


def same(a: Size, b: Size) -> bool:
    """Whether two numbers are known to be equal."""
    return always(a == b)


def is_one(size: Size) -> bool:
    """Whether a dimension is known to have one place."""
    return same(size, 1)


def joint(a: Sequence[Size], b: Sequence[Size]) -> tuple[Size, ...]:
    """The sizes that two blocks of as many dimensions have together."""
    return tuple(y if is_one(x) else x for x, y in zip(a, b, strict=True))


def at_least(a: Size, b: Size) -> bool:
    """Whether one stride is known to be another or more: it is so many times that, of sizes of 1 or
    more, of which torch does not know what it knows of numbers."""
    if always(a >= b) or (same(b, 1) and isinstance(a, torch.SymInt)):
        return True
    quotient = _quotient(a, b)
    return bool(quotient.is_integer and (quotient.is_positive or _is_count(quotient)))


def _is_count(quotient: Any) -> bool:
    """Whether a number is 1 or more where all sizes that it is made of are, as one of blocks."""
    sizes = {size: ValueRanges(1, int_oo) for size in quotient.free_symbols}
    return bool(bound_sympy(quotient, sizes).lower >= 1)


def times(a: Size, b: Size) -> Size:
    """How many times one stride goes into another."""
    quotient = _quotient(a, b)
    return int(quotient) if quotient.is_Integer else a // b


def _quotient(a: Size, b: Size) -> Any:
    """As torch says it; not a number where that is not known."""
    if not all(isinstance(n, int | torch.SymInt) for n in (a, b)) or same(b, 0):
        return sympy.nan
    first, second = (
        sympy.sympify(n.node.expr if isinstance(n, torch.SymInt) else n) for n in (a, b)
    )
    return sympy.cancel(first / second)


def strides(tensor: Tensor) -> tuple[Size, ...]:
    """A tensor's strides, said by its sizes where they are products of these.

    A program may be run on an input of other strides than it was captured with. Elements are where
    they were then, one after the other: that is what its strides have to say.
    """
    sizes, given = tensor.shape, tensor.stride()
    smaller = [
        [n for n, other in zip(sizes, given, strict=True) if not at_least(other, stride)]
        for stride in given
    ]
    said = []
    for factors, stride in zip(smaller, given, strict=True):
        product = math.prod(factors)
        # Of a size that may be 0, torch has the stride of 1: then there is no element.
        counted = math.prod(n if type(n) is int else torch.sym_max(1, n) for n in factors)
        said.append(product if same(product, stride) or same(counted, stride) else stride)
    return tuple(said)


@dataclass(frozen=True)
class Linear:
    """`base + sum(step * place)` at each place of a block.

    Args:
        base: at the first place.
        steps: by which the number grows from one place to the next, one per dimension; 0 where the
            dimension has one place.
        sizes: of the block.
    """

    base: Size
    steps: tuple[Size, ...]
    sizes: tuple[Size, ...]

    @classmethod
    def of(cls, number: Size, dims: int) -> "Linear":
        """The same number everywhere."""
        return cls(number, (0,) * dims, (1,) * dims)

    def __add__(self, other: "Linear") -> "Linear":
        steps = tuple(a + b for a, b in zip(self.steps, other.steps, strict=True))
        return Linear(self.base + other.base, steps, joint(self.sizes, other.sizes))

    def times(self, number: Size) -> "Linear":
        """Each of them times one number."""
        return Linear(self.base * number, tuple(s * number for s in self.steps), self.sizes)

    def over(self, number: Size) -> "Linear | None":
        """Each of them divided by a positive number, if it divides all of them."""
        if type(number) is not int or not all(
            type(n) is int and n % number == 0 for n in (self.base, *self.steps)
        ):
            return None
        return Linear(self.base // number, tuple(s // number for s in self.steps), self.sizes)

    def last(self) -> Size:
        """The largest of them, if all sizes are of one place or more."""
        return self.base + sum(
            step * (size - 1) for step, size in self._dims() if not always(step <= 0)
        )

    def first(self) -> Size:
        """The smallest of them, likewise."""
        return self.base + sum(
            step * (size - 1) for step, size in self._dims() if not always(step >= 0)
        )

    def _dims(self) -> list[tuple[Size, Size]]:
        return [*zip(self.steps, self.sizes, strict=True)]

    def tensor(self, device: torch.device) -> Tensor:
        """As int64, of the block's sizes, but 1 in dimensions in which all are alike."""
        out: Any = None
        for dim, (step, size) in enumerate(self._dims()):
            if same(step, 0):
                continue
            shape = [size if i == dim else 1 for i in range(len(self.sizes))]
            part = torch.arange(size, device=device).view(shape) * step
            out = part if out is None else out + part
        if out is None:
            return torch.full([1] * len(self.sizes), self.base, dtype=torch.int64, device=device)
        whole: Tensor = out if same(self.base, 0) else out + self.base
        return whole
