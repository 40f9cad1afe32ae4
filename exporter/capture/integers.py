"""`int(…)`, `float(…)` and `len(…)` in model code, which make numbers of dynamic sizes.

What Python's own return, as of `int(height / 2)`, is always a number, so a capture takes the size
of its example for good. For the time of another capture the code has others, which leave sizes
what they are; and loops over a size take a few turns, see `turns`. Of `isinstance(size, int)` code
hears what it hears elsewhere.
"""

import builtins
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import BuiltinFunctionType, FrameType
from typing import Any
from unittest import mock

import torch
from torch import SymFloat, SymInt, Tensor
from torch.fx.experimental import symbolic_shapes

from fuseport.exporter.capture import _associative, turns
from fuseport.exporter.capture._gone_over import Parts, is_long
from fuseport.exporter.capture.blockers import is_users
from fuseport.exporter.capture.turns import turning
from fuseport.exporter.program.sizes import _known, listed
from fuseport.exporter.program.sizes._functions import OF_SIZES
from fuseport.exporter.program.sizes._logarithms import Logarithm
from fuseport.exporter.program.sizes.bounds import not_negative
from fuseport.exporter.program.sizes.listed import Item, Listed, vector_of
from fuseport.exporter.program.sizes.quotients import quotient_of

__all__ = ["LOOPS", "Place", "as_numbers", "noticed", "symbolic", "unseen"]

Place = tuple[dict[str, Any], str]
"""The names that are global in a module of model code, and which of these it calls, or `LOOPS`,
where it goes round as often as a size says."""

LOOPS = "index"
"""What Python calls of a size for that."""


@contextmanager
def noticed() -> Iterator[list[Place]]:
    """The code that makes numbers of dynamic sizes by these meanwhile, each module once."""
    found: list[Place] = []

    def note(caller: FrameType, called: str) -> None:
        names = caller.f_globals
        if is_users(caller) and not any(n is names and c == called for n, c in found):
            found.append((names, called))

    def noting(kind: Any, called: str) -> Any:
        own = getattr(kind, f"__{called}__")

        def to_number(given: Any) -> int:
            if (known := _known.number(own, (given,))) is not None:
                return int(known)
            note(sys._getframe(1), called)
            number: int = own(given)
            return number

        return mock.patch.object(kind, f"__{called}__", to_number)

    def as_float(size: SymInt | SymFloat) -> float:
        note(sys._getframe(1), "float")
        number: float = size.node.guard_float("", 0)
        return number

    one_by_one = listed.numbers

    def numbers(vector: Tensor) -> list[Any]:
        note(sys._getframe(2), "len")  # of a list of them, which has one for each of the example's
        return one_by_one(vector)

    whole = (noting(kind, "int") for kind in (SymInt, SymFloat, Tensor, Item, Logarithm))
    floats = (
        mock.patch.object(kind, "__float__", as_float, create=True) for kind in (SymInt, SymFloat)
    )
    kinds: tuple[Any, ...] = (Tensor, Listed, Parts)
    lengths = *(noting(kind, "len") for kind in kinds), noting(SymInt, LOOPS)

    def parts(frame: FrameType) -> None:
        note(frame, LOOPS)

    gone_over = mock.patch.object(listed, "numbers", numbers)
    with ExitStack() as stack:
        scans = _associative.noting(parts)
        others = gone_over, turns.Taken(parts), scans, unseen(__file__)
        for noted in (*whole, *floats, *lengths, *others):
            stack.enter_context(noted)
        yield found


@contextmanager
def as_numbers() -> Iterator[None]:
    """Have model code take dynamic sizes for `int` where it asks what they are."""

    def taken_for(kind: type) -> Callable[[Any, str], Any]:
        def attribute(of: Any, name: str) -> Any:
            if name == "__class__" and is_users(sys._getframe(1)):
                return kind
            return object.__getattribute__(of, name)

        return attribute

    kinds = {SymInt: int, SymFloat: float}
    with ExitStack() as stack:
        for own, kind in kinds.items():
            stack.enter_context(mock.patch.object(own, "__getattribute__", taken_for(kind)))
        yield


@contextmanager
def unseen(*own: str) -> Iterator[None]:
    """Torch notes the code that asks for a size: it is not these files of ours."""
    files = {*symbolic_shapes.uninteresting_files(), *own}

    def uninteresting_files() -> set[str]:
        return files

    with mock.patch.object(symbolic_shapes, "uninteresting_files", uninteresting_files):
        yield


@contextmanager
def symbolic(code: Sequence[Place]) -> Iterator[Mapping[str, str | None]]:
    """Have these leave dynamic sizes what they are in some modules.

    Given is which loops have gone over one there; see `turns.Turning`.
    """
    others = {"int": _Int, "float": _Float, "len": _len}
    with ExitStack() as stack:
        stack.enter_context(unseen(__file__, turns.__file__))
        looped = [names for names, called in code if called == LOOPS]
        found: Mapping[str, str | None] = {}
        if looped:
            stack.enter_context(mock.patch.object(Tensor, "__len__", _unasked(Tensor.__len__)))
            mode = stack.enter_context(turning())
            found = mode.loops
            stack.enter_context(_associative.one_by_one(mode.range))
            for names in looped:
                instead = {"range": mode.range, "enumerate": mode.enumerate, "sum": mode.sum}
                stack.enter_context(mock.patch.dict(names, instead))
        for names, called in code:
            if called in others:
                stack.enter_context(mock.patch.dict(names, {called: others[called]}))
            functions = {
                name: OF_SIZES[value]
                for name, value in names.items()
                if isinstance(value, BuiltinFunctionType) and value in OF_SIZES
            }
            stack.enter_context(mock.patch.dict(names, functions))  # `from math import sqrt`
        yield found


def _len(of: Any) -> Any:
    if (vector := vector_of(of)) is not None:
        of = vector
    if isinstance(of, Parts):
        return of.count_of_all
    return of.shape[0] if isinstance(of, Tensor) and of.dim() else builtins.len(of)


def _unasked(own: Callable[[Tensor], int]) -> Callable[[Tensor], int]:
    """`Tensor.__len__`, where Python asks it unasked, of a tensor that it makes a list of."""

    def length(of: Tensor) -> int:
        frame = sys._getframe(1)
        while frame.f_code.co_filename == __file__ and frame.f_back is not None:
            frame = frame.f_back
        if frame.f_globals.get("len") is _len and is_long(of, 0):
            raise TypeError("how long a list will be is no number")  # Python goes on without
        return own(of)

    return length


class _As(type):
    """Of a class that is taken for one of Python's own, which it is of."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.__mro__[1])

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.__mro__[1])

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.__mro__[1]

    def __hash__(cls) -> int:
        return hash(cls.__mro__[1])


class _Float(float, metaclass=_As):
    def __new__(cls, *arguments: Any) -> Any:
        if len(arguments) == 1 and isinstance(arguments[0], Logarithm):
            return arguments[0].number()
        if len(arguments) == 1 and isinstance(arguments[0], SymInt | SymFloat):
            return torch.sym_float(arguments[0])
        return builtins.float(*arguments)


class _Int(int, metaclass=_As):
    def __new__(cls, *arguments: Any) -> Any:
        if len(arguments) == 1 and isinstance(arguments[0], Item):
            return arguments[0].whole()
        if len(arguments) == 1 and isinstance(arguments[0], Logarithm):
            return math.trunc(arguments[0])
        if len(arguments) == 1 and isinstance(arguments[0], Tensor):
            arguments = (arguments[0].item(),)
        if len(arguments) != 1 or not isinstance(arguments[0], SymInt | SymFloat):
            return builtins.int(*arguments)
        size = arguments[0]
        over, by = quotient_of(size) or (None, None)
        # The same, and torch can reason about it.
        if over is not None and not_negative(over):
            return over // by
        return torch.sym_int(size)
