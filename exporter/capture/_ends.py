"""Loops of model code that go on until a value is reached are left after some turns."""

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from fuseport.exporter.capture._counters import Counters
from fuseport.exporter.capture._tests_of_loops import Test, test_at
from fuseport.exporter.capture._turn_numbers import noting
from fuseport.exporter.capture.blockers import users_frame
from fuseport.exporter.capture.decisions import place_of
from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.program.loops.reached import Condition, Unreached

__all__ = ["MOST_TURNS", "Ends", "Entered"]

MOST_TURNS = 1024
"""Of a loop that no value is to end, for it to be known how many it takes."""

_ROOM = 2**28  # bytes of tensors that code may hold in turns that no value is to end


@dataclass
class Entered:
    """A loop that is gone round.

    Attributes:
        place: of what asks whether it goes on, `file:line`.
        test: what asks.
        turns: that were taken before it was asked last.
        left: whether that was answered so that it was left.
    """

    place: str
    test: Test
    turns: int = -1
    left: bool = False
    conditions: list[Any] = field(default_factory=list)  # their places in the code, of one turn
    at: int = 0  # of them, the one that is asked
    counters: Counters | None = None
    held: int = 0  # at first, in bytes
    by: str = ""  # where code has decided by what differs between turns


class Ends:
    """Answers code that asks whether a loop goes on.

    Args:
        places: of what asks, in the loops that are meant; None for all.
        after: how many turns each of them takes, in their order, None where no value ends it; of
            those behind them, `MOST_TURNS`. Without it, as many as values say.
        endless: of them, by their numbers, those that nothing else ends.

    Attributes:
        entered: the loops, in their order.
    """

    def __init__(
        self,
        places: Container[str] | None = None,
        after: Sequence[int | None] | None = None,
        endless: Container[int] = (),
    ) -> None:
        self._places, self._after, self._endless = places, after, endless
        self.entered: list[Entered] = []
        self._open: dict[tuple[FrameType, int], int] = {}

    def asked(self, condition: Tensor, frame: FrameType) -> Condition | None:
        """What a condition comes to that code asks for; None if it is not about a loop's end.

        Raises:
            Unreached: such a loop is in another one, or its turns are not alike.
            ExportFailed: it takes ever more memory.
        """
        frame = users_frame(frame)
        found, place = test_at(frame), place_of(frame)
        if found is None or (self._places is not None and place not in self._places):
            return None
        test, position = found
        if self._after is None:
            return Condition(place, 0, 0, 0, bool(condition), test.goes_on)
        key = frame, test.line
        if key not in self._open:
            self._open[key] = len(self.entered)
            self.entered.append(Entered(place, test))
        number = self._open[key]
        if number < len(self.entered) - 1:
            raise Unreached(place, "there is another one in it")
        loop = self.entered[number]
        if not loop.conditions or position == loop.conditions[0]:
            loop.turns, loop.at = loop.turns + 1, 0
            self._begin(loop, frame, number)
        else:
            loop.at += 1
        if loop.turns == 0:
            loop.conditions.append(position)
        is_last = loop.turns == 0 or loop.at == len(loop.conditions) - 1
        loop.left = loop.turns == self._most(number) and is_last
        if loop.left:
            del self._open[key]
        comes_to = test.goes_on is not loop.left
        return Condition(place, number, loop.turns, loop.at, comes_to, test.goes_on)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Within, what code decides by the number of a turn is noted."""

        def differs(frame: FrameType) -> None:
            for number in self._open.values():
                self.entered[number].by = place_of(frame)

        with noting(differs):
            yield

    def _most(self, number: int) -> int | None:
        assert self._after is not None
        return self._after[number] if number < len(self._after) else MOST_TURNS

    def _begin(self, loop: Entered, frame: FrameType, number: int) -> None:
        """Another turn begins."""
        if loop.by:
            raise Unreached(
                loop.place, f"it goes on otherwise in some of its turns, as {loop.by} decides"
            )
        if self._most(number) == MOST_TURNS:
            held = _held(frame)
            loop.held = loop.held or held
            if held > max(_ROOM, 2 * loop.held):
                raise ExportFailed(
                    f"the program cannot be captured: a loop goes on until {loop.place} says, and "
                    "what it holds grows from turn to turn"
                )
        if number in self._endless:
            loop.counters = loop.counters or Counters(frame)
            loop.counters.turn()


def _held(frame: FrameType) -> int:
    """The bytes of the tensors that variables of a function are, or have in them."""
    leaves = pytree.tree_leaves([*frame.f_locals.values()])
    return sum(x.nbytes for x in leaves if isinstance(x, Tensor))
