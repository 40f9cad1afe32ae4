"""What calls of a model write to its parameters and buffers, which is undone.

Model code may change what its checkpoint has: S4's kernels double their length, and multiply their
parameters, at the first sequence that is longer; others count. What a program is held against is
the model of the checkpoint, at every call.
"""

import copy
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)

from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.models._attributes import attributes, refill, same_items, tensors
from fuseport.exporter.models._deriving import deriving, shapes_of
from fuseport.exporter.program._writing import written

__all__ = ["carry", "remember", "undoing"]

aten = torch.ops.aten

Place = tuple[str, str, tuple[Any, ...]]
"""The way to a module, a dictionary of it (`""` for its attributes), and the keys in there."""

_calls = threading.RLock()


@dataclass(frozen=True)
class _Held:
    """A tensor that was in a module before any call.

    Attributes:
        place: where.
        part: the module in which it is.
        tensor: it.
    """

    place: Place
    part: "ReferenceType[nn.Module]"
    tensor: Tensor

    def now(self) -> Any:
        """What is there now."""
        return _at(self.part(), *self.place[1:])

    def put(self, value: Any) -> None:
        """Put something there."""
        part, (_, kind, (*keys, last)) = self.part(), self.place
        within: Any = _dictionary(part, kind)
        for key in keys:
            within = within[key]
        within[last] = value

    def is_stored(self) -> bool:
        """Whether a checkpoint has it."""
        part, (_, kind, (name, *_)) = self.part(), self.place
        return kind == "_parameters" or (
            kind == "_buffers" and part is not None and name not in part._non_persistent_buffers_set
        )

    def is_replaced(self, put: Tensor) -> bool:
        """Whether a call has changed the model's state by having something else there than `put`.

        A table that is in no state dict, and has another size now, is no state.
        """
        now = self.now()
        if now is put or self.place[1] == "":
            return False
        if self.is_stored():
            return True
        return not isinstance(now, Tensor) or (now.shape, now.dtype) == (put.shape, put.dtype)


@dataclass
class _State:
    """What is known of the calls of a module.

    Attributes:
        written: where they have written to what was there.
        writing: by the shapes of inputs, whether calls change the module's state.
        fills: whether the first has filled what a checkpoint does not have.
        watchable: whether calls run while it is watched what they write to.
        held: what was there.
    """

    written: set[Place] = field(default_factory=set)
    writing: dict[Any, bool] = field(default_factory=dict)
    fills: bool = False
    watchable: bool = True
    held: Sequence[_Held] = ()


# By module, the shapes of its buffers, and its tensors that are neither those nor parameters.
_there: "WeakKeyDictionary[nn.Module, Mapping[tuple[str, tuple[Any, ...]], Any]]"
_there = WeakKeyDictionary()
_states: "WeakKeyDictionary[nn.Module, _State]" = WeakKeyDictionary()


def remember(module: nn.Module) -> None:
    """Take note of what a module holds, before any call of it."""
    for part in module.modules():
        found: dict[tuple[str, tuple[Any, ...]], Any] = {}
        found |= {("_parameters", (name,)): None for name, _ in part._parameters.items()}
        found |= {
            ("_buffers", (name,)): None if is_lazy(buffer) else buffer.shape
            for name, buffer in part._buffers.items()
            if buffer is not None
        }
        found |= {("", keys): ref(tensor) for keys, tensor in _in_attributes(part)}
        _there[part] = found


def carry(module: nn.Module, copied: nn.Module) -> None:
    """Have what is known of the calls of a module be known of those of a copy, too."""
    if state := _states.get(module):
        writing = {} if state.fills else dict(state.writing)  # a copy is not filled yet
        _states[copied] = _State(set(state.written), writing, watchable=state.watchable)


def undoing(module: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, which calls the module, without what it writes to the module.

    That is what there was when it was remembered: parameters, buffers and other tensors, written to
    in place, or replaced. If a call does so, the module is afterwards what it was before in every
    respect; what others keep in it, as tables, stays. So does what is filled at the first call
    alone, if no checkpoint has it, or has it just so.

    What a call writes to in place it is given copies of, once that is known. For that the first
    call for each choice of the inputs' shapes is watched, and made again if it has written to
    something.

    Raises:
        ExportFailed: a call writes in place to what the first for these shapes did not.
    """

    def alone(*inputs: Any) -> Any:
        state = _states.setdefault(module, _State())
        with _calls:  # of several threads
            _refresh(module, state)
            changes = state.writing.get(shapes_of(inputs))
            if changes is None and state.held:
                return _watched(module, state, call, inputs)
            if changes:
                with _undone(module), _replaced(state):
                    return _plain(state, call, inputs)
        return _plain(state, call, inputs)

    return deriving(module, alone)


def _plain(state: _State, call: Callable[..., Any], inputs: Sequence[Any]) -> Any:
    """A call that writes in place to nothing that is there."""
    before = [held.tensor._version for held in state.held]
    put = [held.now() for held in state.held]
    result = call(*inputs)
    for held, version, value in zip(state.held, before, put, strict=True):
        if held.tensor._version != version:
            path, _, keys = held.place
            name = ".".join(map(str, (path, *keys))).lstrip(".")
            raise ExportFailed(
                f"the model writes to {name} by the values of its inputs: what it computes hangs on"
                " the calls before; let its code compute something new there"
            )
        if held.is_replaced(value):
            held.put(value)
    return result


def _watched(
    module: nn.Module, state: _State, call: Callable[..., Any], inputs: Sequence[Any]
) -> Any:
    """The first call for some shapes, of which it is found out what it writes to."""
    shapes = shapes_of(inputs)
    while state.watchable:
        given = [x for x in pytree.tree_leaves(inputs) if _is_plain(x)]
        with _undone(module) as kept, _replaced(state):
            put = [(held, held.now()) for held in state.held]
            watch = _Writes([*(tensor for _, tensor in put), *given])
            try:
                with watch, _compiled_unwatched():
                    result = call(*inputs)
            except Exception:  # of the model's, or since it takes no such modes
                watch.undo()
                break
            places = {held.place for held, tensor in put if watch.has_written(tensor)}
            if places <= state.written:
                replaced = any(held.is_replaced(tensor) for held, tensor in put)
                changed = bool(places) or replaced or _sets_modes(kept)
                state.writing[shapes] = changed
                if not changed:
                    kept.clear()
                return result
            if not state.written and _fills(put, watch, lambda: call(*inputs)):
                state.fills = True
                kept.clear()
                return result
            watch.undo()
        state.written |= places
    with _replaced(state):
        result = _plain(state, call, inputs)
    state.watchable, state.writing[shapes] = False, bool(state.written)
    return result


def _fills(put: Sequence[tuple[_Held, Tensor]], watch: "_Writes", call: Callable[[], Any]) -> bool:
    """Whether the call that was watched has changed nothing that a checkpoint has, and another one
    writes to nothing, as where the first fills a table."""
    stored = (held.is_stored() and watch.has_changed(tensor) for held, tensor in put)
    if any(stored) or any(held.is_replaced(tensor) for held, tensor in put):
        return False
    again = _Writes([tensor for _, tensor in put])
    try:
        with again, _compiled_unwatched():
            call()
    except Exception:  # of the model's, which is not as before
        again.undo()
        return False
    if any(again.has_written(tensor) for _, tensor in put):
        again.undo()
        return False
    return True


@contextmanager
def _undone(module: nn.Module) -> Iterator[list[Any]]:
    """What the module and its parts hold is the same afterwards, but for what is written in place.

    Unless the list that is given is cleared: it is what there was.
    """
    before = [
        (
            [(d, dict(d)) for d in (part._parameters, part._buffers, part._modules)],
            part,
            attributes(part),
            [(v, copy.copy(v)) for v in attributes(part).values() if type(v) in _CONTAINERS],
        )
        for part in module.modules()
    ]
    try:
        yield before
    finally:
        for dictionaries, part, own, containers in before:
            for name in attributes(part).keys() - own.keys():
                del vars(part)[name]
            vars(part).update(own)
            for container, items in (*dictionaries, *containers):
                refill(container, items)


def _sets_modes(before: Sequence[Any]) -> bool:
    """Whether parts hold other words or parts than they did, and but for numbers nothing is new.

    By those the next call does something else; where calls keep tables, too, these say that. Of
    calls that only count, what they do by that is to be seen.
    """
    changed = False
    for (*held, (parts, parts_before)), part, own, containers in before:
        now = attributes(part)
        values = [(own.get(name), now.get(name)) for name in now.keys() | own.keys()]
        others = [pair for pair in values if pair[0] is not pair[1]]
        if any(not isinstance(value, _MODES) for pair in others for value in pair):
            return False
        if not all(same_items(items, there) for there, items in (*held, *containers)):
            return False
        words = [pair for pair in others if any(isinstance(value, bool | str) for value in pair)]
        changed |= any(was != value for was, value in words) or parts != parts_before
    return changed


@contextmanager
def without_modes(module: nn.Module) -> Iterator[None]:
    """Numbers, words and parts that the module and its parts have are the same afterwards."""
    before = [(part, attributes(part), dict(part._modules)) for part in module.modules()]
    try:
        yield
    finally:
        for part, own, parts in before:
            now = attributes(part)
            for name, value in own.items():
                if isinstance(value, _MODES) and isinstance(now.get(name), _MODES):
                    vars(part)[name] = value
            refill(part._modules, parts)


_CONTAINERS = (dict, list, set)
_MODES = (bool, int, float, str, type(None))


@contextmanager
def _replaced(state: _State) -> Iterator[None]:
    """There are copies in the place of what calls write to, of which autograd knows the origin."""
    copies: dict[int, Tensor] = {}
    for held in state.held:
        if held.place in state.written:
            copies.setdefault(id(held.tensor), held.tensor.clone())
    here = [held for held in state.held if id(held.tensor) in copies]
    for held in here:
        held.put(copies[id(held.tensor)])
    try:
        yield
    finally:
        for held in here:
            if held.now() is copies[id(held.tensor)]:
                held.put(held.tensor)


def _refresh(module: nn.Module, state: _State) -> None:
    """Find what the module holds, if it is not what it was."""
    if not state.held or any(held.now() is not held.tensor for held in state.held):
        state.held = list(_held(module))


def _held(module: nn.Module) -> Iterator[_Held]:
    for path, part in module.named_modules():
        weak = ref(part)
        for (kind, keys), known in _there.get(part, {}).items():
            tensor = _at(part, kind, keys)
            if not _is_plain(tensor):
                continue
            if (kind == "_buffers" and tensor.shape != known) or (
                not kind and known() is not tensor
            ):
                continue  # what a call has made, as tables
            yield _Held((path, kind, keys), weak, tensor)


def _in_attributes(part: nn.Module) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """Tensors that attributes of a module have, themselves or in lists and dictionaries."""
    for name, value in attributes(part).items():
        for keys, tensor in tensors(value):
            within, whole = value, True
            for key in keys:
                whole = whole and type(within) in (dict, list)
                within = _item(within, key)
            if whole:
                yield (name, *keys), tensor


def _dictionary(part: nn.Module | None, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = {} if part is None else vars(part)
    return found.get(kind, {}) if kind else found


def _at(part: nn.Module | None, kind: str, keys: Sequence[Any]) -> Any:
    value: Any = _dictionary(part, kind)
    for key in keys:
        value = _item(value, key)
    return value


def _item(container: Any, key: Any) -> Any:
    """What is there in a container; None where nothing is."""
    if isinstance(container, dict):
        return container.get(key)
    is_there = isinstance(container, list) and isinstance(key, int) and key < len(container)
    return container[key] if is_there else None


def _is_plain(value: Any) -> bool:
    """Whether it is a tensor in memory of its own kind, of which torch counts the writes."""
    return (
        isinstance(value, Tensor)
        and not is_lazy(value)
        and not is_traceable_wrapper_subclass(value)
        and not torch._C._functorch.is_functorch_wrapped_tensor(value)
        and value.layout is torch.strided
        and not value.is_inference()
    )


class _Writes(TorchDispatchMode):
    """Keeps copies of tensors from before they are written to."""

    supports_higher_order_operators = True

    def __init__(self, watched: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watched = list({id(tensor): tensor for tensor in watched}.values())
        self._numbers = {id(tensor): number for number, tensor in enumerate(self._watched)}
        self._aliases = [tensor.data for tensor in self._watched]
        self._before: dict[int, Tensor] = {}
        self._places: dict[int, list[tuple[int, int, int]]] = {}
        for number, tensor in enumerate(self._watched):
            if (memory := _memory(tensor)) is not None:
                storage, begin, end = memory
                self._places.setdefault(storage, []).append((begin, end, number))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for tensor in _written_to(func, args, kwargs or {}):
            memory = _memory(tensor)
            for begin, end, number in self._places.get(memory[0], ()) if memory else ():
                if memory and memory[1] < end and begin < memory[2] and number not in self._before:
                    self._before[number] = self._aliases[number].clone()
        return func(*args, **(kwargs or {}))

    def has_written(self, tensor: Tensor) -> bool:
        """Whether something was written to one of the tensors, or it has other memory now."""
        number = self._numbers[id(tensor)]
        return number in self._before or self._is_elsewhere(number)

    def has_changed(self, tensor: Tensor) -> bool:
        """Whether it has other values now."""
        number = self._numbers[id(tensor)]
        if self._is_elsewhere(number):
            return True
        before = self._before.get(number)
        return before is not None and not torch.allclose(tensor, before, 0, 0, equal_nan=True)

    def _is_elsewhere(self, number: int) -> bool:
        return _memory(self._watched[number]) != _memory(self._aliases[number])

    def undo(self) -> None:
        """Make all tensors what they were."""
        with torch.no_grad():
            for number, value in self._before.items():
                self._aliases[number].copy_(value)
        for number, tensor in enumerate(self._watched):
            if self._is_elsewhere(number):
                tensor.data = self._aliases[number]


@contextmanager
def _compiled_unwatched() -> Iterator[None]:
    """What calls compile, as `torch.cond` does what it calls, is called without any mode."""
    compiling: Callable[..., Any] = torch.compile

    def compiled(*args: Any, **kwargs: Any) -> Any:
        function = compiling(*args, **kwargs)

        @functools.wraps(function)
        def call(*inputs: Any, **named: Any) -> Any:
            with _disable_current_modes():
                return function(*inputs, **named)

        return call

    with mock.patch.object(torch, "compile", compiled):
        yield


# Which write to running statistics, third and fourth, where they train; their schemas do not say.
_NORMS = (aten.native_batch_norm.default, aten.cudnn_batch_norm.default)


def _written_to(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors that an operator writes to."""
    if func in _NORMS and args[5]:
        yield from (x for x in args[3:5] if isinstance(x, Tensor))
    yield from (x for x in written(func, args, kwargs) if isinstance(x, Tensor))


def _memory(tensor: Tensor) -> tuple[int, int, int] | None:
    """The storage of a tensor, and where it begins and ends in that; None of what has none."""
    if not _is_plain(tensor) or not tensor.numel():
        return None
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    length = sum((int(size) - 1) * int(stride) for size, stride in sizes) + 1
    begin = int(tensor.storage_offset()) * tensor.itemsize
    return tensor.untyped_storage()._cdata, begin, begin + length * tensor.itemsize
