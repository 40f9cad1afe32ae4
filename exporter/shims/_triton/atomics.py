"""Atomic operations of `triton.language`.

All programs add at once, as the order does not matter. What an operation returns does depend on it:
where that is asked for, programs run one after the other, and in the opposite order besides, and
what they store has to be the same.
"""

from collections.abc import Callable
from typing import Any

import torch

from fuseport.exporter.shims._triton.memory import is_known, optional, pointer_of
from fuseport.exporter.shims._triton.programs import Asked, Unknown, programs
from fuseport.exporter.shims._triton.values import Value, as_value, binary

__all__ = ["ATOMICS"]

_MOST = 1000
"""Operations in turn that change nothing, before it is taken that a program waits for another."""


class _Before(Value):
    """What was in memory before an operation.

    Args:
        rank: of the block.
        read: gives it, or raises why it is not known, when it is asked for.
    """

    def __init__(self, rank: int, read: Callable[[], Value]) -> None:
        self.rank = rank
        self._read = read

    def __getattr__(self, name: str) -> Any:
        return self._read().of if name == "of" else super().__getattr__(name)


def _returning(name: str, change: Callable[..., None], new: Callable[[Value, Value], Value]) -> Any:
    """An operation that all programs can do at once.

    Args:
        name: of it.
        change: does it, in memory.
        new: of what was there before and the operand, what is there then.
    """

    def operation(pointer: Any, value: Any, mask: Any = None, *by: Any, **more: Any) -> Value:
        at, given, where = pointer_of(pointer), as_value(value), optional(mask)
        rank = max(v.rank for v in (at.at, given, where) if v is not None)
        if programs().at_once:
            change(at.memory, at.at, given, where)
            return _Before(rank, lambda: _asked(name))
        if not at.memory.is_once(at.at, given, where):
            change(at.memory, at.at, given, where)
            return _Before(rank, lambda: _several(name))
        return _in_turn(name, pointer, lambda before: new(before, given), value, mask)

    return operation


def _asked(name: str) -> Any:
    raise Asked(f"what triton.language.{name} returns")


def _several(name: str) -> Any:
    raise Unknown(
        f"triton.language.{name} goes to one place several times at once, or to places that are "
        "not known, and what it returns is asked for"
    )


def _in_turn(
    name: str, pointer: Any, new: Callable[[Value], Value], value: Any, mask: Any
) -> Value:
    """An operation that one program does after the other.

    Args:
        name: of it.
        pointer: where.
        new: of what was there before, what is there then.
        value: what `new` takes besides.
        mask: where it is done.
    """
    at, where = pointer_of(pointer), optional(mask)
    if programs().at_once:
        _asked(name)
    if not at.memory.is_once(at.at, as_value(value), where):
        _several(name)
    before = at.memory.load(at.at, where, None)
    after = new(before)
    at.memory.store(at.at, after, where)
    if is_known(before.tensor):
        same = bool((after.tensor == before.tensor).all())
        at.memory.unchanged = at.memory.unchanged + 1 if same else 0
    if at.memory.unchanged > _MOST:
        raise Unknown(f"a program waits by triton.language.{name} for what another one does")
    return before


def _exchanged(name: str, new: Callable[[Value, Value], Value]) -> Any:
    def operation(pointer: Any, value: Any, mask: Any = None, *by: Any, **more: Any) -> Value:
        given = as_value(value)
        return _in_turn(name, pointer, lambda before: new(before, given), given, mask)

    return operation


def atomic_cas(pointer: Any, cmp: Any, val: Any, *by: Any, **more: Any) -> Value:
    """Replaces what is at a pointer where it is `cmp`; gives what was there before."""

    def new(before: Value) -> Value:
        kept = binary("eq", before, cmp).tensor
        other = as_value(val).at_rank(before.rank).tensor.to(before.tensor.dtype)
        return Value(torch.where(kept, other, before.tensor), before.rank)

    return _in_turn("atomic_cas", pointer, new, val, None)


def _added(memory: Any, *given: Any) -> None:
    memory.add(*given)


def _largest(memory: Any, *given: Any) -> None:
    memory.extreme(*given, "amax")


def _smallest(memory: Any, *given: Any) -> None:
    memory.extreme(*given, "amin")


def _operator(name: str) -> Callable[[Value, Value], Value]:
    return lambda before, given: binary(name, before, given)


ATOMICS: dict[str, Any] = {
    "atomic_add": _returning("atomic_add", _added, _operator("add")),
    "atomic_max": _returning("atomic_max", _largest, _operator("maximum")),
    "atomic_min": _returning("atomic_min", _smallest, _operator("minimum")),
    "atomic_and": _exchanged("atomic_and", _operator("and")),
    "atomic_or": _exchanged("atomic_or", _operator("or")),
    "atomic_xor": _exchanged("atomic_xor", _operator("xor")),
    "atomic_xchg": _exchanged("atomic_xchg", lambda before, given: given),
    "atomic_cas": atomic_cas,
}
"""By name, functions of `triton.language`."""
