"""`int(…)` in model code, which makes numbers of dynamic sizes: `int(height / 2)`, `int(n ** 0.5)`.

What Python's `int` returns is always a number, so a capture takes the size of its example for good.
For the time of another capture the code has an `int` that leaves sizes what they are.
"""

import builtins
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import SymFloat, SymInt
from torch.fx.experimental import symbolic_shapes

from fuseport.exporter.capture.blockers import is_users
from fuseport.exporter.program.symbolic import not_negative, quotient_of

__all__ = ["Globals", "noticed", "symbolic"]

Globals = dict[str, Any]
"""The names that are global in a module of model code."""


@contextmanager
def noticed() -> Iterator[list[Globals]]:
    """The code that makes numbers of dynamic sizes by `int` meanwhile, each module once."""
    found: list[Globals] = []

    def noting(kind: type) -> Any:
        own = kind.__int__  # type: ignore[attr-defined]

        def to_number(size: Any) -> int:
            caller = sys._getframe(1)
            if is_users(caller) and not any(known is caller.f_globals for known in found):
                found.append(caller.f_globals)
            number: int = own(size)
            return number

        return mock.patch.object(kind, "__int__", to_number)

    with noting(SymInt), noting(SymFloat), _unseen():
        yield found


@contextmanager
def _unseen() -> Iterator[None]:
    """Torch notes the code that asks for a size: it is not this file."""
    files = {*symbolic_shapes.uninteresting_files(), __file__}

    def uninteresting_files() -> set[str]:
        return files

    with mock.patch.object(symbolic_shapes, "uninteresting_files", uninteresting_files):
        yield


@contextmanager
def symbolic(code: Sequence[Globals]) -> Iterator[None]:
    """Have `int` leave dynamic sizes what they are in some modules."""
    with ExitStack() as stack:
        stack.enter_context(_unseen())
        for names in code:
            stack.enter_context(mock.patch.dict(names, {"int": _Int}))
        yield


class _AsInt(type):
    """Of a class that is taken for `int`."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, builtins.int)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, builtins.int)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is builtins.int

    def __hash__(cls) -> int:
        return hash(builtins.int)


class _Int(int, metaclass=_AsInt):
    def __new__(cls, *arguments: Any) -> Any:
        if len(arguments) != 1 or not isinstance(arguments[0], SymInt | SymFloat):
            return builtins.int(*arguments)
        size = arguments[0]
        over, by = quotient_of(size) or (None, None)
        # The same, and torch can reason about it.
        if over is not None and not_negative(over):
            return over // by
        return torch.sym_int(size)
