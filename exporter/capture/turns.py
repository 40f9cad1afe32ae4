"""Loops of model code over a dynamic size: `for t in range(x.shape[1])`, `for step in x`.

How often Python goes round is a number, and a capture takes it from its example for good. For the
time of another capture such a loop takes a few turns, which are marked in the graph; `rolled` makes
of them a loop over all. The number of a turn is a number that notes what is decided by it: that
must come to the same in all turns but the first.
"""

import builtins
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import SymBool, SymInt, Tensor
from torch._C import _functorch as functorch
from torch._functorch import vmap
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._sympy.value_ranges import ValueRanges

from fuseport.exporter.capture._counters import Counters
from fuseport.exporter.capture._gone_over import (
    JOINS,
    Parts,
    is_dynamic,
    is_long,
    joining,
    lists_of,
    part_of,
)
from fuseport.exporter.capture._turn_numbers import TurnNumber, noting
from fuseport.exporter.capture.blockers import is_users, users_frame
from fuseport.exporter.capture.decisions import place_of
from fuseport.exporter.program.loops.rolled import (
    END,
    TURNS,
    Unrolled,
    next_turn,
    stack_turns,
    turn_marker,
)
from fuseport.exporter.program.matching import ASSERT
from fuseport.exporter.program.sizes.of_graph import examples_of
from fuseport.exporter.user_code.known_calls import stand_in

__all__ = ["Taken", "Turning", "turning"]

_ROOM = __name__.rpartition(".")[0]
_MOST = 4096  # of a size at which there could be enough turns


class Turning(TorchFunctionMode):
    """Has the loops of model code over dynamic sizes take a few turns each.

    `range`, `enumerate` and `sum` are to take the place of Python's in that code.

    Attributes:
        loops: by place in the code, the function that computes what that is in seems to, if known.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loops: dict[str, str | None] = {}
        self._loops: list[_Loop] = []
        self._within: list[_Loop] = []  # of them, those that are gone round, the outermost first
        # By a tensor's id: itself, which keeps that id, and the turn of each loop that made it.
        self._made: dict[int, tuple[Tensor, dict[_Loop, int]]] = {}
        self._held: _Held = {}

    def range(self, *bounds: Any) -> Any:
        """What `range` returns, over a few of its numbers where a bound is dynamic."""
        dynamic = [bound for bound in bounds if isinstance(bound, SymInt)]
        if not dynamic or not all(map(is_dynamic, dynamic)):
            return builtins.range(*bounds)
        start, stop, step = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)[:3]
        if isinstance(step, SymInt) and step != 0:
            return _by_steps(start, stop, step)
        if not isinstance(step, int) or step == 0 or (step < 0 and isinstance(start, int)):
            return builtins.range(*bounds)
        return _Numbers(self, start, stop, step)

    def enumerate(self, over: Any, start: int = 0) -> Iterator[tuple[Any, Any]]:
        """What `enumerate` gives, the numbers those of turns where there are such."""
        if not isinstance(over, _Numbers) and not is_long(over, 0):
            yield from builtins.enumerate(over, start)
            return
        for number, each in builtins.enumerate(over):
            yield _number(start, 1, number), each

    def sum(self, over: Any, start: Any = 0) -> Any:
        """What `sum` gives: of tensors that turns made, of all turns."""
        given = list(over) if self._loops or isinstance(over, Iterator) else over
        if self._loops and given and self._are_of_turns(given):
            whole = self._joined(torch.stack, given, 0).sum(0)
            return whole if isinstance(start, int) and start == 0 else start + whole
        return builtins.sum(given, start)

    def _are_of_turns(self, given: list[Any]) -> bool:
        """Whether there are tensors of one shape alone, some of them made in a loop before."""
        first = given[0]
        if not all(isinstance(each, Tensor) and each.shape == first.shape for each in given):
            return False
        return any(loop not in self._within for each in given for loop in self._turns_of(each))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (part := part_of(func, args, kwargs)) is not None:
            return Parts(self.turns, args[0], *part)
        with self:
            func, args, kwargs = joining(func, args, kwargs)
        if func in JOINS and (lists := lists_of(func, args, kwargs)):
            result = self._joined(func, *lists)
        else:
            result = func(*args, **kwargs)
        if self._loops and functorch.peek_interpreter_stack() is None:
            self._note(result, (args, kwargs))
        return result

    def _note(self, result: Any, given: Any) -> None:
        """Note which turns made what a function returns."""
        turns: dict[_Loop, set[int]] = {}
        for each in pytree.tree_leaves(given):
            for loop, turn in self._turns_of(each).items():
                turns.setdefault(loop, set()).add(turn)
        of_one = {loop: turn for loop, (turn, *others) in turns.items() if not others}
        of_one |= {loop: loop.turn for loop in self._within}
        for each in pytree.tree_leaves(result):
            if isinstance(each, Tensor) and not functorch.is_functorch_wrapped_tensor(each):
                self._made[id(each)] = each, of_one
                # A part by values, `x[i]`, torch cannot look at again once `x` is written to.
                kept = each.clone() if free_unbacked_symbols(each.storage_offset()) else each
                for loop in self._within:
                    loop.made.append(kept)

    def mapped(self, own: Callable[..., Any], *args: Any) -> Any:
        """What `vmap` gives, of tensors that are of no turn within it."""
        result = own(*args)
        if self._within:
            self._note(result, ())
        return result

    def _turns_of(self, x: Any) -> dict["_Loop", int]:
        """The turns that made a tensor, of each loop one; none, where several of it did."""
        return self._made[id(x)][1] if isinstance(x, Tensor) and id(x) in self._made else {}

    def _joined(self, func: Any, tensors: Parts | Sequence[Tensor], dim: int) -> Tensor:
        """What joins tensors, with what all turns of a loop make in the place of that of a few."""
        parts: list[Tensor] = []
        at = 0
        added = func is torch.stack
        if isinstance(tensors, Parts):
            whole = tensors.stacked().movedim(0, dim)
            if added:
                return whole
            # Whether it is laid out so, torch would ask of its sizes.
            return whole.clone(memory_format=torch.contiguous_format).flatten(dim, dim + 1)
        while at < len(tensors):
            found = next(filter(None, (self._run(tensors, at, loop) for loop in self._loops)), None)
            if found is None:
                parts.append(tensors[at].unsqueeze(dim) if added else tensors[at])
                at += 1
                continue
            whole, length = found
            whole = whole.movedim(0, dim)
            parts.append(whole if added else whole.flatten(dim, dim + 1))
            at += length
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def _run(self, tensors: Sequence[Tensor], at: int, loop: "_Loop") -> tuple[Tensor, int] | None:
        """What all turns of a loop made, stacked, where a list has that of a few from a place on.

        Beside it, how long that is in the list: of each turn there may be several tensors, one
        after the other. What a turn is given by the one before is there of the first, too.
        """
        if loop in self._within:
            return None
        turns = [self._turns_of(each).get(loop) for each in tensors[at:]]
        some = next((i for i, turn in enumerate(turns) if turn != turns[0]), len(turns))
        for width in dict.fromkeys((some, 1)):
            each = [turn for turn in builtins.range(TURNS) for _ in builtins.range(width)]
            length = len(each)
            if turns[:length] == each:
                rows = [tensors[at + i : at + length : width] for i in builtins.range(width)]
                of_each = [stack_turns(list(row), loop.count, loop.number) for row in rows]
                whole = of_each[0] if width == 1 else torch.stack(of_each, 1).flatten(0, 1)
                return whole, length
        run = list(tensors[at : at + TURNS])
        if turns[:TURNS] == [*builtins.range(TURNS)][::-1]:
            return stack_turns(run[::-1], loop.count, loop.number).flip(0), TURNS
        before = turns[:TURNS] == [None, *builtins.range(TURNS - 1)]
        if before and turns[TURNS : TURNS + 1] != [TURNS - 1]:
            return stack_turns(run, loop.count, loop.number), TURNS
        return None

    def turns(self, count: Any, value: Callable[[Any], Any], frame: FrameType) -> Iterator[Any]:
        """What a few turns of a loop go over.

        Args:
            count: of all of them.
            value: what the turn of a number goes over.
            frame: that the loop is in.

        Raises:
            Unrolled: code decides by what differs from turn to turn, or the example is too
                small for so many.
        """
        loop = _Loop(len(self._loops), place_of(frame), count)
        self.loops.setdefault(loop.place, stand_in(users_frame(frame).f_code.co_name))
        self._loops.append(loop)
        self._within.append(loop)
        counters = Counters(users_frame(frame))
        try:
            with loop.longer(self._held):
                for number in builtins.range(TURNS):
                    counters.turn()
                    loop.mark(number)
                    yield value(number)
                    loop.refuse()
                loop.mark(END)
                counters.end(count)
        finally:
            self._within.remove(loop)

    def differs(self, frame: FrameType) -> None:
        """Note that model code decides by the number of a turn."""
        for loop in self._within:
            loop.by = place_of(frame)

    def decided(self, condition: Any, frame: FrameType | None) -> None:
        """Note that model code decides by a size, or by a condition on some."""
        while frame is not None and str(frame.f_globals.get("__name__")).startswith(_ROOM):
            frame = frame.f_back
        if frame is not None and is_users(frame):
            for loop in self._within:
                if condition.node.expr.free_symbols & loop.count.node.expr.free_symbols:
                    loop.by = place_of(frame)


@contextmanager
def turning() -> Iterator[Turning]:
    """Within, such loops take a few turns, where `range` is the mode's."""
    mode = Turning()

    def noting_decisions(kind: Any) -> Any:
        own = kind.__bool__

        def asked(condition: Any) -> bool:
            mode.decided(condition, sys._getframe(1))
            decision: bool = own(condition)
            return decision

        return mock.patch.object(kind, "__bool__", asked)

    mapped = partial(mode.mapped, vmap._unwrap_batched)
    with (
        mock.patch.object(vmap, "_unwrap_batched", mapped),
        noting_decisions(SymBool),
        noting_decisions(SymInt),
        noting(mode.differs),
        mode,
    ):
        yield mode


class _Loop:
    """One that is gone round.

    Attributes:
        number: of it.
        place: in model code.
        count: of its turns.
        turn: that is taken.
        made: in that turn so far.
        by: where code has decided by what differs between them; empty if nowhere.
    """

    def __init__(self, number: int, place: str, count: Any) -> None:
        self.number, self.place, self.count = number, place, count
        self.turn = END
        self.made: list[Tensor] = []
        self.by = ""

    def mark(self, number: int) -> None:
        self.turn = number
        made = [torch.zeros(()), *self.made]
        ASSERT(next_turn(self.count, made), turn_marker(self.number, number, self.place))
        self.made = []

    def refuse(self) -> None:
        if self.by:
            raise Unrolled(
                f"the loop at {self.place} goes on otherwise in some of its turns, as {self.by} "
                "decides"
            )

    @contextmanager
    def longer(self, held: "_Held") -> Iterator[None]:
        """Sizes at which there are so many turns are known to be that large meanwhile."""
        env, expr = self.count.node.shape_env, self.count.node.expr
        symbols = sorted(expr.free_symbols, key=str)
        enough = (n for n in builtins.range(1, _MOST) if _at(expr, symbols, n) >= TURNS)
        least = next(enough, None)
        if least is None:
            raise Unrolled(f"the loop at {self.place} takes {expr} turns")
        _check_example(env, symbols, least, self.place)
        with ExitStack() as stack:
            for symbol in symbols:
                stack.enter_context(_at_least(env, symbol, least, held))
            yield


def _at(expr: Any, symbols: list[Any], size: int) -> int:
    found = expr.subs(dict.fromkeys(symbols, size))
    return int(found) if found.is_number else 0


def _check_example(env: ShapeEnv, symbols: list[Any], least: int, place: str) -> None:
    hints = examples_of(env)
    for symbol in symbols:
        hint = hints.get(symbol)
        if hint is not None and int(hint) < least:
            raise Unrolled(
                f"the loop at {place} takes fewer than {TURNS} turns at a size of {hint}: give an "
                f"example of {least} or more, --size"
            )


_Held = dict[Any, tuple[ValueRanges[Any], list[int]]]
"""By symbol, between what it lies, and what it is known not to be below in loops."""


@contextmanager
def _at_least(env: ShapeEnv, symbol: Any, least: int, held: _Held) -> Iterator[None]:
    """Within, a size is known not to be below a number. What is within need not end in order."""
    known, all_least = held.setdefault(symbol, (env.var_to_range[symbol], []))

    def tell() -> None:
        least = max(all_least, default=known.lower)
        env.var_to_range[symbol] = known & ValueRanges(least, known.upper)
        env._update_version_counter()

    all_least.append(least)
    tell()
    try:
        yield
    finally:
        all_least.remove(least)
        tell()
        if not all_least:
            held.pop(symbol)


class Taken(TorchFunctionMode):
    """Tells of code that goes over a dynamic dimension of a tensor.

    Args:
        note: is given the frame of the call.
    """

    def __init__(self, note: Callable[[FrameType], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if part_of(func, args, kwargs or {}) is not None:
            self._note(users_frame(sys._getframe(1)))
        return func(*args, **(kwargs or {}))


def _number(start: Any, step: int, turn: int) -> Any:
    at = start + step * turn
    return at if turn == 0 or not isinstance(at, int) else TurnNumber(at, start + step, step)


def _by_steps(start: Any, stop: Any, step: SymInt) -> list[Any]:
    """The numbers of a `range` in steps of a size, as the one of `range(0, n, n)`: how many there
    are is decided by sizes."""
    numbers = []
    while start < stop if step > 0 else start > stop:
        numbers.append(start)
        start = start + step
    return numbers


class _Numbers:
    """A `range` with a dynamic bound."""

    def __init__(self, mode: Turning, start: Any, stop: Any, step: int) -> None:
        self._mode, self._start, self._stop, self._step = mode, start, stop, step

    def __iter__(self) -> Iterator[Any]:
        return self._from(self._start, self._step, sys._getframe(1))

    def __reversed__(self) -> Iterator[Any]:
        last = self._start + (self._count() - 1) * self._step
        return self._from(last, -self._step, sys._getframe(1))

    def __len__(self) -> int:
        return int(self._count())

    def __getitem__(self, index: Any) -> Any:
        return builtins.range(self._start, self._stop, self._step)[index]

    def _count(self) -> Any:
        span = self._stop - self._start if self._step > 0 else self._start - self._stop
        size = abs(self._step)
        return span if size == 1 else (span + size - 1) // size

    def _from(self, start: Any, step: int, frame: FrameType) -> Iterator[Any]:
        count = self._count()
        if not isinstance(count, SymInt):  # as of range(n, n + 3)
            return (start + step * number for number in builtins.range(count))
        return self._mode.turns(count, lambda number: _number(start, step, number), frame)
