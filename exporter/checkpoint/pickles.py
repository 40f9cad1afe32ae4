"""Reads what a pickle would do, without doing it.

torch's `weights_only` unpickler is what loads; this runs before it, over the same bytes, for three
things that it does not give: every refused name at once instead of the first, an answer for
protocols it does not read, and the sizes claimed for storages before any is allocated.
"""

import itertools
import pickletools
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from dataclasses import dataclass, field
from typing import BinaryIO

from fuseport.exporter.checkpoint.allowed import STORAGES

__all__ = ["MalformedPickleError", "Scan", "scan"]


# Hashing a tuple recurses without a limit of its own, and visits a shared part each time it occurs.
_TUPLE_DEPTH = 64
_TUPLE_SIZE = 1_000_000


class MalformedPickleError(ValueError):
    """The bytes are no pickle, or one that no pickler writes."""


@dataclass(frozen=True)
class Scan:
    """What a pickle names.

    Attributes:
        names: globals in order, without repeats, as `module.name`.
        storages: bytes claimed for each storage, by its key in the file.
        kinds: the type of each storage, `torch.FloatStorage` for example, by the same key.
        broken: why the scan ended early, or None.
    """

    names: tuple[str, ...]
    storages: dict[str, int]
    broken: str | None = None
    kinds: dict[str, str] = field(default_factory=dict)


def scan(stream: BinaryIO, pickles: int = 1) -> Scan:
    """Follow the next `pickles` pickles of `stream` on an abstract stack; run nothing of them."""
    machine = _Machine()
    try:
        for _ in range(pickles):
            machine.follow(stream)
    except MalformedPickleError as error:
        return Scan(tuple(machine.names), machine.storages, str(error), machine.kinds)
    return Scan(tuple(machine.names), machine.storages, None, machine.kinds)


@dataclass(frozen=True)
class _Global:
    name: str


class _Tuple(tuple[object, ...]):
    """A tuple that knows how much it unfolds to: as a key it is hashed, which visits all of it."""

    depth: int
    size: int


_MARK = object()
_UNKNOWN = object()


@dataclass
class _Machine:
    """Follows a pickle's stack as far as names, constants and tuples; all else is unknown."""

    names: dict[str, None] = field(default_factory=dict)
    storages: dict[str, int] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)

    def follow(self, stream: BinaryIO) -> None:
        stack: list[object] = []
        memo: dict[int, object] = {}
        try:
            for opcode, argument, _ in pickletools.genops(stream):
                self._step(opcode, argument, stack, memo)
        except MalformedPickleError:
            raise
        except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError) as error:
            raise MalformedPickleError(
                f"malformed pickle ({type(error).__name__}: {error})"
            ) from error

    def _step(
        self,
        opcode: pickletools.OpcodeInfo,
        argument: object,
        stack: list[object],
        memo: dict[int, object],
    ) -> None:
        name = opcode.name
        if name == "MARK":
            stack.append(_MARK)
        elif name in ("GLOBAL", "INST"):
            if name == "INST":
                _pop_to_mark(stack)
            stack.append(self._name(*str(argument).split(" ", 1)))
        elif name == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            stack.append(self._name(_text(module), _text(attribute)))
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[int(str(argument))] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[int(str(argument))])
        elif name == "TUPLE":
            stack.append(_tuple(_pop_to_mark(stack)))
        elif name in ("EXT1", "EXT2", "EXT4"):
            stack.append(self._name("copyreg", f"extension[{argument}]"))
        elif name in ("PERSID", "BINPERSID"):
            self._storage(argument if name == "PERSID" else stack.pop())
            stack.append(_UNKNOWN)
        elif name == "DUP":
            stack.append(stack[-1])
        elif opcode.stack_after and not opcode.stack_before and argument is not None:
            stack.append(argument)
        else:
            _generic(opcode, stack)

    def _name(self, module: str, attribute: str = "") -> _Global:
        # Protocols up to 2 name modules as Python 2 did; torch's unpickler maps them the same way.
        if (module, attribute) in NAME_MAPPING:
            module, attribute = NAME_MAPPING[module, attribute]
        else:
            module = IMPORT_MAPPING.get(module, module)
        found = _Global(f"{module}.{attribute}")
        self.names.setdefault(found.name)
        return found

    def _storage(self, identity: object) -> None:
        """Note a storage from its persistent id: ("storage", type, key, location, numel, ...)."""
        match identity:
            case ("storage", _Global(kind), str(key), str(), int(numel), *_) if numel >= 0:
                size = numel * _item_size(kind)
            case _:
                raise MalformedPickleError("a reference to something that is no storage")
        self.kinds[key] = kind
        if self.storages.setdefault(key, size) != size:
            raise MalformedPickleError(f"storage {key!r} has two sizes")


def _generic(opcode: pickletools.OpcodeInfo, stack: list[object]) -> None:
    """Pop and push what pickletools says the opcode pops and pushes."""
    before = [item.name for item in opcode.stack_before]
    if "mark" in before:
        _pop_to_mark(stack)
        before = before[: before.index("mark")]
    if len(stack) < len(before):
        raise MalformedPickleError(f"malformed pickle ({opcode.name} on a stack that is too short)")
    popped = [stack.pop() for _ in before]
    if opcode.name in ("TUPLE1", "TUPLE2", "TUPLE3"):
        stack.append(_tuple(popped[::-1]))
    else:
        stack.extend(itertools.repeat(_UNKNOWN, len(opcode.stack_after)))


def _tuple(items: list[object]) -> _Tuple:
    result = _Tuple(items)
    inner = [item for item in items if isinstance(item, _Tuple)]
    result.depth = 1 + max((item.depth for item in inner), default=0)
    result.size = 1 + len(items) + sum(item.size for item in inner)
    if result.depth > _TUPLE_DEPTH or result.size > _TUPLE_SIZE:
        raise MalformedPickleError("tuples that nest or unfold beyond any checkpoint's")
    return result


def _pop_to_mark(stack: list[object]) -> list[object]:
    items: list[object] = []
    while (item := stack.pop()) is not _MARK:
        items.append(item)
    return items[::-1]


def _text(value: object) -> str:
    return value if isinstance(value, str) else "<computed>"


def _item_size(kind: str) -> int:
    if kind == "torch.storage.UntypedStorage":
        return 1
    size = STORAGES.get(kind.removeprefix("torch."))
    if size is None:
        raise MalformedPickleError(f"a storage of unknown type {kind}")
    return size
