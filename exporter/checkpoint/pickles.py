"""Reads what a pickle would do, without doing it.

torch's `weights_only` unpickler is what loads; this runs before it, over the same bytes, for what
it does not give: every refused name at once instead of the first, an answer for protocols it does
not read, and sizes of storages and tensors, and arguments of calls, before anything is allocated.
"""

import itertools
import pickletools
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from dataclasses import dataclass, field
from typing import BinaryIO

from fuseport.exporter.checkpoint.allowed import STORAGES
from fuseport.exporter.checkpoint.calls import (
    EMPTY,
    UNKNOWN,
    Global,
    Storage,
    Tensor,
    Tuple,
    called,
)
from fuseport.exporter.checkpoint.opcodes import OPERATIONS, MalformedPickleError, operations

__all__ = ["Scan", "scan"]


@dataclass(frozen=True)
class Scan:
    """What a pickle names.

    Attributes:
        names: globals in order, without repeats, as `module.name`.
        storages: bytes claimed for each storage, by its key in the file.
        broken: what is wrong with it first, or None.
        kinds: the type of each storage, `torch.FloatStorage` for example, by the same key.
        texts: of the last pickle, those of up to 1 MiB.
    """

    names: tuple[str, ...]
    storages: dict[str, int]
    broken: str | None = None
    kinds: dict[str, str] = field(default_factory=dict)
    texts: frozenset[str] = frozenset()


def scan(stream: BinaryIO, pickles: int = 1, most: int = OPERATIONS) -> Scan:
    """Follow the next `pickles` pickles of `stream` on an abstract stack; run nothing of them.

    Args:
        stream: what has them.
        pickles: how many.
        most: operations of each.
    """
    machine = _Machine()
    broken = None
    try:
        for _ in range(pickles):
            machine.follow(stream, most)
    except MalformedPickleError as error:
        broken = str(error)
    return Scan(
        tuple(machine.names),
        machine.storages,
        machine.fault or broken,
        machine.kinds,
        frozenset(machine.texts),
    )


_MARK = object()
_PUSHES = (0, False, 1)


@dataclass
class _Machine:
    """Follows a pickle's stack as far as names, constants, tuples and tensors.

    A wrong call is noted and passed over, so that all names are seen.
    """

    names: dict[str, None] = field(default_factory=dict)
    storages: dict[str, int] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    texts: set[str] = field(default_factory=set)
    fault: str | None = None

    def follow(self, stream: BinaryIO, most: int) -> None:
        stack: list[object] = []
        memo: dict[int, object] = {}
        self.texts.clear()
        try:
            for opcode, argument in operations(stream, most):
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
        if name in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[int(str(argument))] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[int(str(argument))])
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "EMPTY_TUPLE":
            stack.append(EMPTY)
        elif name == "TUPLE":
            stack.append(Tuple.of(_pop_to_mark(stack)))
        elif name in ("REDUCE", "NEWOBJ"):
            arguments, function = stack.pop(), stack.pop()
            result, wrong = called(function, arguments)
            stack.append(result)
            self._note(wrong)
        elif name == "BUILD":
            stack.pop()
            if isinstance(stack[-1], Storage | Tensor):
                self._note("a state for a tensor or storage, which torch.save never writes")
        elif name in ("GLOBAL", "INST"):
            if name == "INST":
                _pop_to_mark(stack)
            assert isinstance(argument, tuple)
            stack.append(self._name(*argument))
        elif name == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            stack.append(self._name(_text(module), _text(attribute)))
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("EXT1", "EXT2", "EXT4"):
            stack.append(self._name("copyreg", f"extension[{argument}]"))
        elif name in ("PERSID", "BINPERSID"):
            stack.append(self._storage(argument if name == "PERSID" else stack.pop()))
        elif name == "DUP":
            stack.append(stack[-1])
        elif argument is not None and _EFFECTS[name] == _PUSHES:
            if isinstance(argument, str):
                self.texts.add(argument)
            stack.append(argument)
        else:
            _generic(name, stack)

    def _note(self, wrong: str | None) -> None:
        self.fault = self.fault or wrong

    def _name(self, module: str, attribute: str) -> Global:
        # Protocols up to 2 name modules as Python 2 did; torch's unpickler maps them the same way.
        if (module, attribute) in NAME_MAPPING:
            module, attribute = NAME_MAPPING[module, attribute]
        else:
            module = IMPORT_MAPPING.get(module, module)
        found = Global(f"{module}.{attribute}")
        self.names.setdefault(found.name)
        return found

    def _storage(self, identity: object) -> Storage:
        """A storage by its persistent id: ("storage", type, key, location, numel, view)."""
        match identity:
            case ["storage", Global(kind), str(key), str(), int(numel), *view] if numel >= 0:
                if any(isinstance(part, Tuple) for part in view):
                    raise MalformedPickleError("a view of a storage, which torch < 0.4 wrote")
            case _:
                raise MalformedPickleError("a reference to something that is no storage")
        item = _item_size(kind)
        if self.storages.setdefault(key, numel * item) != numel * item:
            raise MalformedPickleError(f"storage {key!r} has two sizes")
        if self.kinds.setdefault(key, kind) != kind:
            raise MalformedPickleError(f"storage {key!r} has two types")
        return Storage(item, numel * item)


def _generic(name: str, stack: list[object]) -> None:
    """Pop and push what pickletools says the opcode pops and pushes."""
    count, to_mark, pushed = _EFFECTS[name]
    if to_mark:
        _pop_to_mark(stack)
    if len(stack) < count:
        raise MalformedPickleError(f"malformed pickle ({name} on a stack that is too short)")
    popped = stack[len(stack) - count :]
    del stack[len(stack) - count :]
    if name in ("TUPLE1", "TUPLE2", "TUPLE3"):
        stack.append(Tuple.of(popped))
    elif name in ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS"):
        stack.append(popped[0])  # the container that was there
    else:
        stack.extend(itertools.repeat(UNKNOWN, pushed))


def _effect(opcode: pickletools.OpcodeInfo) -> tuple[int, bool, int]:
    """How many it pops, before that whether all to the mark, and how many it pushes."""
    before = [item.name for item in opcode.stack_before]
    if "mark" in before:
        return before.index("mark"), True, len(opcode.stack_after)
    return len(before), False, len(opcode.stack_after)


_EFFECTS = {opcode.name: _effect(opcode) for opcode in pickletools.opcodes}


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
