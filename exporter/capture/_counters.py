"""What model code counts by itself in a loop: `n += 1`, beside the number of the turn.

A capture has a few turns of the loop, and what is decided by a counter in these may come to
something else in others. So a counter is a number of turns, too, which notes that; and behind the
loop it is what all turns make of it, as is the number of the last turn. It is told by what of the
variables of a function changes from turn to turn.
"""

import ctypes
import itertools
import sys
from types import FrameType
from typing import Any

from fuseport.exporter.capture._turn_numbers import TurnNumber

__all__ = ["Counters"]

_LEAST = -(2**62)  # of a number of which nothing is known but that it changes


class Counters:
    """The variables of a function that change from turn to turn of a loop in it.

    Args:
        frame: of the function.
    """

    def __init__(self, frame: FrameType) -> None:
        self._frame = frame
        self._before: list[dict[str, int]] = []  # at the beginning of each turn

    def turn(self) -> None:
        """Another turn begins."""
        self._before.append(self._numbers())
        if len(self._before) > 1:
            self._put({name: self._of_turn(name) for name in self._changing()})

    def end(self, count: Any) -> None:
        """There are no more.

        Args:
            count: how many there are in all.
        """
        self._before.append(self._numbers())
        steps = {name: self._step(name) for name in self._changing()}
        first = self._before[1]
        self._put({name: first[name] + step * (count - 1) for name, step in steps.items() if step})

    def _numbers(self) -> dict[str, int]:
        here = self._frame.f_locals.items()
        return {name: int.__int__(x) for name, x in here if type(x) in (int, TurnNumber)}

    def _changing(self) -> list[str]:
        now = self._before[-1]
        return [
            name
            for name, value in now.items()
            if any(each.get(name, value) != value for each in self._before)
        ]

    def _of_turn(self, name: str) -> int:
        now = self._before[-1][name]
        step = self._step(name)
        if step is None or step < 0:
            return TurnNumber(now, _LEAST, 1)
        return TurnNumber(now, self._before[1][name], step)

    def _step(self, name: str) -> int | None:
        """By how much it changes from each turn to the next; None where that is not the same."""
        values: list[Any] = [each.get(name) for each in self._before[1:]]
        if len(values) == 1:
            values.insert(0, self._before[0].get(name))
        if None in values:
            return None
        steps = {after - before for before, after in itertools.pairwise(values)}
        return steps.pop() if len(steps) == 1 else None

    def _put(self, values: dict[str, Any]) -> None:
        """Have variables be these."""
        if not values:
            return
        here = self._frame.f_locals
        here.update(values)
        if sys.version_info < (3, 13):  # what this is, is a copy
            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(self._frame), ctypes.c_int(0))
