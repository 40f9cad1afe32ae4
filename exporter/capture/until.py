"""Loops of model code that go on until a value is reached: `while error > 0.1:`, `if …: break`.

A capture follows a few turns. It is captured with no turn, too, and, where it ends by itself after
so many, with all of them; of these `reached` makes a loop of any number. That is held against the
model, whose loops are left after as many turns whatever the values.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from fuseport.exporter.capture import sizes
from fuseport.exporter.capture._ends import Ends, Entered
from fuseport.exporter.capture.attempts import Attempt, went
from fuseport.exporter.capture.holding import going_its_way, is_same
from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.program import Program
from fuseport.exporter.program.loops.reached import Loop, Reached, Unreached
from fuseport.exporter.program.loops.rolled import TURNS

__all__ = ["Loops", "loops"]

_FEW = 4  # times that are asked for like other decisions
_LEAST = 3  # times that a loop that ends by itself has to go on
_TRIED = (0, 1, 2, TURNS + 2)  # turns, of a program and of its model
_INPUTS = 3  # at which that is tried


@dataclass(frozen=True)
class Loops:
    """Loops of a model that are left by values.

    Attributes:
        entered: they, in the order in which they are gone round.
    """

    entered: Sequence[Entered]

    def as_values_say(self) -> Ends:
        """They take as many turns as values say."""
        return Ends(self._places)

    def program(self, way: Attempt, captured: Callable[[Attempt], Program]) -> Program:
        """A program in which they are loops.

        Args:
            way: by which the model goes else.
            captured: the program of an attempt.

        Raises:
            Unreached: one cannot be captured for any number of turns.
            ExportFailed: as of `captured`.
        """

        def after(turns: Mapping[int, int | None]) -> Attempt:
            return replace(way, ends=partial(self._ends, turns))

        some = captured(after({}))
        found: list[Loop] = []
        for number, each in enumerate(self.entered):
            none = captured(after({number: 0}))
            ended = None if each.left else captured(after({number: None}))
            found.append(Loop(each.place, none, ended, _most(each)))
        reached = Reached(some, found)
        program = reached.program()
        for number, turns in self._tried():
            exactly = reached.program({**self._few, number: turns})
            given = None if turns == _most(self.entered[number]) else turns
            if not _is_same(exactly, after({number: given})):
                place = self.entered[number].place
                raise Unreached(place, "its program gives something else than the model")
        return replace(program, decided=(*program.decided, *self._said()))

    @property
    def _places(self) -> frozenset[str]:
        return frozenset(loop.place for loop in self.entered)

    @property
    def _few(self) -> dict[int, int]:
        """The turns that a capture has of each."""
        most = enumerate(map(_most, self.entered))
        return {number: TURNS if n is None else min(TURNS, n - 1) for number, n in most}

    def _ends(self, turns: Mapping[int, int | None]) -> Ends:
        """They take a few turns each, some of them others; None where no value ends one."""
        after = [turns.get(number, few) for number, few in self._few.items()]
        endless = [number for number, loop in enumerate(self.entered) if loop.left]
        return Ends(self._places, after, endless)

    def _tried(self) -> Iterator[tuple[int, int]]:
        """One of them by its number, and how many turns it takes."""
        for number, loop in enumerate(self.entered):
            most = _most(loop)
            for turns in _TRIED:
                if most is None or turns < most:
                    yield number, turns
            if most is not None:
                yield number, most

    def _said(self) -> Iterator[str]:
        for place in dict.fromkeys(loop.place for loop in self.entered):
            yield f"the loop that {place} ends is one in the programs, of any number of turns"


def _most(loop: Entered) -> int | None:
    """How often a loop goes on at the most; None if no number ends it."""
    return None if loop.left else loop.turns


def loops(attempt: Attempt) -> Loops | None:
    """Those of a model that are left by values, but for short ones; None if there are none.

    Raises:
        Unreached: one cannot be captured as a loop.
        ExportFailed: one takes ever more memory.
    """
    ends = Ends(after=())
    try:
        went(attempt.model, attempt.inputs, {}, ends)
    except ExportFailed:
        raise
    except Exception:  # the model's own, as of values that such loops do not come to
        return None
    long = {loop.place for loop in ends.entered if loop.left or loop.turns >= _FEW}
    found = [loop for loop in ends.entered if loop.place in long]
    for loop in found:
        if not loop.left and loop.test.inner:
            raise Unreached(loop.place, "it ends by itself, and is in another one")
        if not loop.left and loop.turns < _LEAST:
            raise Unreached(loop.place, "it has few turns in one call, and many in another")
    return Loops(found) if found else None


def _is_same(program: Program, way: Attempt) -> bool:
    """Whether a program gives what its model does, whose loops take as many turns."""
    module = going_its_way(program)
    others = itertools.islice(sizes.others(way.model), _INPUTS - 1)
    for number, call in enumerate(way.calls(itertools.chain([way.inputs], others))):
        try:
            inputs, expected = call()
        except Unreached:
            raise
        except Exception:  # the model's own, which may take no such sizes
            if number == 0:
                raise
            continue
        if not is_same(module, inputs, expected):
            return False
    return True
