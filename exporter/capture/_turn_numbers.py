"""Numbers that go up from turn to turn of a loop, and note what is decided by them."""

import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import SymInt

from fuseport.exporter.capture.blockers import is_users

__all__ = ["TurnNumber", "noting"]

_NOTES: list[Callable[[FrameType], None]] = []


@contextmanager
def noting(note: Callable[[FrameType], None]) -> Iterator[None]:
    """Have what differs from turn to turn noted meanwhile.

    Args:
        note: is given the frame of model code that decides so.
    """
    _NOTES.append(note)
    try:
        yield
    finally:
        _NOTES.remove(note)


class TurnNumber(int):
    """The number of a turn, or one that goes up with it from turn to turn.

    Args:
        value: in this turn.
        least: in the second turn, the first that others are like.
        step: by which it goes up.
    """

    def __new__(cls, value: int, least: int, step: int) -> "TurnNumber":
        made = super().__new__(cls, value)
        made.least, made.step = least, step
        return made

    least: int
    step: int

    def _plain(self) -> int:
        return int.__int__(self)

    def _differs(self, frame: FrameType) -> None:
        """Note that what comes next differs from turn to turn."""
        if is_users(frame):
            for note in _NOTES:
                note(frame)

    def __add__(self, other: Any) -> Any:
        if type(other) is not int:
            return self._plain() + other
        return TurnNumber(self._plain() + other, self.least + other, self.step)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        if type(other) is not int:
            return self._plain() - other
        return self + -other

    def __mul__(self, other: Any) -> Any:
        if type(other) is not int or other <= 0:
            return self._plain() * other
        return TurnNumber(self._plain() * other, self.least * other, self.step * other)

    __rmul__ = __mul__

    def __bool__(self) -> bool:
        if self.least <= 0:
            self._differs(sys._getframe(1))
        return self._plain() != 0

    def __hash__(self) -> int:
        self._differs(sys._getframe(1))
        return hash(self._plain())


def _compared(name: str, *, least: bool) -> Any:
    """A comparison, which comes to the same in all turns where the other number is below all.

    Args:
        name: of the operator.
        least: whether it does where the other is the least of all, too.
    """
    compare: Callable[[Any, Any], Any] = getattr(operator, name)
    others = (int, float, SymInt) if name in ("eq", "ne") else object

    def noted(self: TurnNumber, other: Any) -> Any:
        below = type(other) is int and (other < self.least or (least and other == self.least))
        if not below and isinstance(other, others):
            self._differs(sys._getframe(1))
        return compare(self._plain(), other)

    return noted


def _differing(name: str) -> Any:
    """What else is computed of it."""
    own = getattr(int, name)

    def noted(self: TurnNumber, *others: Any) -> Any:
        self._differs(sys._getframe(1))
        return own(self, *others)

    return noted


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(TurnNumber, f"__{_name}__", _compared(_name, least=_name in ("lt", "ge")))
for _name in (
    *("__mod__", "__rmod__", "__floordiv__", "__rfloordiv__", "__truediv__", "__rtruediv__"),
    *("__pow__", "__rpow__", "__and__", "__or__", "__xor__", "__lshift__", "__rshift__"),
    *("__divmod__", "__rdivmod__", "__float__", "__rsub__", "__neg__"),
    *("__invert__", "__abs__", "__round__", "__floor__", "__ceil__", "__trunc__"),
):
    setattr(TurnNumber, _name, _differing(_name))
