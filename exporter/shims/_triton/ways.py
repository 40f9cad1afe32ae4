"""Ways that programs of a Triton kernel go for themselves, all computed at once.

Of two ways, each is gone by the programs that take it: what others would store is left out, what
they would read is not asked for where there is nothing, and a name has for each program what its
way gave it. See `branching` for the code that calls this.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import SymInt, Tensor

from fuseport.exporter.shims._sizes import always
from fuseport.exporter.shims._triton.blocks import BlockPointer
from fuseport.exporter.shims._triton.branching import EITHER, TURNS, WAY
from fuseport.exporter.shims._triton.functions import negated, truth
from fuseport.exporter.shims._triton.language import Numbers, where
from fuseport.exporter.shims._triton.memory import Pointer, is_known
from fuseport.exporter.shims._triton.places import Linear, is_one, same
from fuseport.exporter.shims._triton.programs import NotUniform, Repeats, programs
from fuseport.exporter.shims._triton.values import NUMBERS, Value, Within, as_value, binary

__all__ = ["WAYS"]

_WHICH, _OFTEN = "which way a kernel goes", "how often a kernel repeats something"
_NONE = object()  # what a name stands for that has not been given anything


class _Ways:
    """Ways that meet again.

    Args:
        chosen: where programs take the first of them; None where all take the same.
    """

    def __init__(self, chosen: Value | None) -> None:
        self._chosen = chosen

    @property
    def both(self) -> bool:
        """Whether more than one is gone."""
        return self._chosen is not None

    def kept(self, *names: Callable[[], Any]) -> tuple[Any, ...]:
        """What names stand for, where more than one way is gone.

        Args:
            names: what gives each, or raises NameError.
        """
        return tuple(map(_read, names)) if self.both else ()

    def merged(self, first: Sequence[Any], second: Sequence[Any]) -> tuple[Any, ...]:
        """What names stand for after both.

        Args:
            first, second: what either way gave them.
        """
        return tuple(map(self._one, first, second))

    def _one(self, first: Any, second: Any) -> Any:
        assert self._chosen is not None
        return _merged(self._chosen, first, second)


class _Branch(_Ways):
    """An `if`."""

    def __init__(self, test: Any) -> None:
        self._test = _known(test)
        super().__init__(None if _is_settled(self._test, _WHICH) else truth(test))

    def first(self) -> bool:
        """Whether its first way is gone; by whom, is said from now on."""
        if self._chosen is None:
            return bool(self._test)
        programs().go(self._chosen)
        return True

    def second(self) -> bool:
        """Whether its other way is gone, likewise."""
        if self._chosen is None:
            return not self._test
        programs().come()
        programs().go(_others(self._chosen))
        return True

    def end(self) -> None:
        """All programs go one way again."""
        if self._chosen is not None:
            programs().come()


class _Turns(_Ways):
    """A loop, which some programs may repeat more often than others.

    Args:
        over: what it goes over.
    """

    def __init__(self, over: Any) -> None:
        super().__init__(None)
        self._over = over

    def __iter__(self) -> Iterator[Any]:
        over = self._over
        if not isinstance(over, Numbers) or all(_is_settled(n, _OFTEN) for n in over.bounds):
            yield from over
            return
        first, stop, step = map(as_value, over.bounds)
        by = step.number
        if not isinstance(by, int | SymInt) or not always(by > 0):
            step.uniform(_OFTEN)
        for turn in range(_most_turns(first, stop, by)):
            place = binary("add", first, as_value(turn * by))
            goes = binary("lt", place, stop)
            self._chosen = None if _known(goes) is True else goes
            if self._chosen is None:
                yield place
                continue
            programs().go(goes)
            yield place
            programs().come()


def _most_turns(first: Value, stop: Value, step: Any) -> int:
    """Of those of all programs.

    Raises:
        Repeats: it hangs on a dynamic dimension.
        NotUniform: it is not known.
    """
    span = binary("sub", stop, first)
    if isinstance(span.of, Tensor) and is_known(span.of):
        most: Any = int(span.of.max())
    else:
        most = span.bounds[1]
    if most is None:
        raise NotUniform(_axes(span), _OFTEN)
    turns = -(-most // step)
    if isinstance(turns, SymInt) and not turns.node.expr.is_number:
        raise Repeats(most, step)
    return int(turns)


def _is_settled(value: Any, what: str) -> bool:
    """Whether it is one number in all programs, and known; none at all is also settled.

    Raises:
        Unknown: it is a block of numbers.
    """
    if not isinstance(value, Value) or value.number is not None:
        return True
    block = value.sizes[len(programs().at_once) :]
    if not all(map(is_one, block)):
        value.uniform(what)  # which says so
    if isinstance(value.of, Tensor) and not is_known(value.of):
        return False
    return not _axes(value)


def _axes(value: Value) -> list[int]:
    """Of the grid, those along which programs differ."""
    here = programs().at_once
    return [axis for axis, size in zip(here, value.sizes, strict=False) if not is_one(size)]


def _known(test: Any) -> Any:
    """A condition, as Python's own where all programs are known to take one way."""
    if not isinstance(test, Value) or not isinstance(test.of, Within):
        return test
    if any(always(each.first() >= 0) for each in test.of.below):
        return False
    return True if all(always(each.last() < 0) for each in test.of.below) else test


def _others(chosen: Value) -> Value:
    """The programs that go the other way."""
    if isinstance(chosen.of, Within) and len(chosen.of.below) == 1:
        (below,) = chosen.of.below
        other = below.times(-1)
        return Value(Within((Linear(other.base - 1, other.steps, other.sizes),)), chosen.rank)
    return negated(chosen)


def _read(name: Callable[[], Any]) -> Any:
    try:
        return name()
    except NameError:
        return _NONE


def _merged(chosen: Value, first: Any, second: Any) -> Any:
    """What is `first` for some programs and `second` for the others.

    Raises:
        NotUniform: no value is both.
    """
    if first is second or second is _NONE:
        return first
    if first is _NONE:  # a program that goes the other way does not ask for it
        return second
    kinds = (NUMBERS, Value)
    if isinstance(first, kinds) and isinstance(second, kinds):
        a, b = as_value(first), as_value(second)
        if _are_same(a, b):
            return first
        if all(map(same, a.shape, b.shape)) and a.rank == b.rank:
            return where(chosen, first, second)
    if isinstance(first, Pointer) and isinstance(second, Pointer) and first.memory is second.memory:
        return Pointer(first.memory, _merged(chosen, first.at, second.at))
    if isinstance(first, BlockPointer) and isinstance(second, BlockPointer):
        moved = _merged(chosen, first.offsets, second.offsets)
        if first == replace(second, offsets=first.offsets):
            return replace(first, offsets=moved)
    if isinstance(first, tuple) and isinstance(second, tuple) and len(first) == len(second):
        return tuple(_merged(chosen, *pair) for pair in zip(first, second, strict=True))
    if type(first) is type(second) and not isinstance(first, kinds) and first == second:
        return first
    raise NotUniform(_axes(chosen), "what a name stands for after ways of their own")


def _are_same(a: Value, b: Value) -> bool:
    if a.number is not None and b.number is not None:
        return type(a.number) is type(b.number) and same(a.number, b.number)
    return a.of is b.of


def _either(test: Any, first: Callable[[], Any], second: Callable[[], Any]) -> Any:
    """`first() if test else second()`."""
    branch = _Branch(test)
    if not branch.both:
        return first() if branch.first() else second()
    branch.first()
    a = first()
    branch.second()
    b = second()
    branch.end()
    return branch.merged([a], [b])[0]


WAYS: Mapping[str, Any] = {EITHER: _either, TURNS: _Turns, WAY: _Branch}
"""What such code names."""
