"""A module's forward: which inputs it takes, and others in its place."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MethodType
from typing import Any, Protocol, TypeVar

from torch import nn

from fuseport.exporter.errors import UsageError
from fuseport.exporter.program import argument_names

__all__ = ["Fields", "ordered", "rewrap", "takes"]

Function = Callable[..., Any]

Tree = str | dict[str, "Tree"]
"""What an argument is made of: an input by its name, or more of these by key."""


class Fields(dict[str, Any]):
    """What a dotted name leads into: `batch["ids"]`, or `batch.ids`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


class _Named(Protocol):
    @property
    def name(self) -> str: ...


T = TypeVar("T", bound=_Named)


def rewrap(module: nn.Module, wrap: Callable[[Function], Function]) -> None:
    """Have `module`, and copies that are made of it, call `wrap` of its forward in place of that.

    Args:
        module: model code may have chosen a forward for this instance alone.
        wrap: gets a function, of a class with the module as the first argument.
    """
    own = module.__dict__.get("forward")
    if own is None:
        module.__dict__["forward"] = MethodType(wrap(type(module).forward), module)
    elif isinstance(own, MethodType) and own.__self__ is module:
        module.__dict__["forward"] = MethodType(wrap(own.__func__), module)
    else:
        module.__dict__["forward"] = wrap(own)


def ordered(module: nn.Module, inputs: Sequence[T], place: str) -> tuple[T, ...]:
    """The inputs in the order in which the module takes them by position from now on.

    They go by name. One alone may have any name where forward begins with a parameter that it can
    only be; if forward takes `*args`, they are as they are given. A name with dots leads into an
    argument: `batch.ids` into a mapping, `pair.0` into a tuple. Where arguments without a value
    come between them, some go by keyword only, or some are made of several, forward is replaced by
    one that takes just these.

    Args:
        module: the user's.
        inputs: of its forward.
        place: where they come from, as messages begin.

    Raises:
        UsageError: names are not of forward's parameters, some that have no default are missing, or
            one leads into another.
    """
    parameters = inspect.signature(module.forward).parameters
    kinds = {p.kind for p in parameters.values()}
    named = [p for p in parameters.values() if p.kind is not p.VAR_KEYWORD]
    needed = [p.name for p in named if p.default is p.empty]
    given = _trees([spec.name for spec in inputs], place)
    order = list(given)
    alone = len(given) == 1 and not given.keys() & parameters.keys()
    by_position = inspect.Parameter.VAR_POSITIONAL in kinds or (alone and len(needed or named) == 1)
    if not by_position:
        order = [p.name for p in named if p.name in given]
        unknown = [name for name in given if name not in order]
        missing = [name for name in needed if name not in given]
        if (unknown and inspect.Parameter.VAR_KEYWORD not in kinds) or missing:
            unknown = [s.name for s in inputs if s.name.partition(".")[0] in unknown]
            wrong = [f"{name} is none of them" for name in unknown]
            wrong += [f"{name} is missing" for name in missing]
            raise UsageError(
                f"{place}{', '.join(s.name for s in inputs)} given, and the model's forward takes "
                f"{takes(module)}: {', '.join(wrong)}{_leading(unknown, missing)}"
            )
        order += unknown
        positional = [p.name for p in named if p.kind is not p.KEYWORD_ONLY]
        by_position = order == positional[: len(order)]
    trees = {name: given[name] for name in order}
    names = list(_leaves(trees))
    if not by_position or any(isinstance(tree, dict) for tree in trees.values()):
        made = functools.partial(_made, trees=trees, names=names, by_position=by_position)
        rewrap(module, functools.partial(made, own=len(parameters)))
    known = {spec.name: spec for spec in inputs}
    return tuple(known[name] for name in names)


def _leading(unknown: Sequence[str], missing: Sequence[str]) -> str:
    """What to write where one argument may be made of the inputs."""
    if len(missing) != 1 or not unknown:
        return ""
    [one] = missing
    names = ", ".join(f"{one}.{name}" for name in unknown)
    return f"; if {one} is a mapping that has these, name them {names}"


def _trees(names: Sequence[str], place: str) -> dict[str, Tree]:
    """By the first part of their names, what arguments are made of."""
    found: dict[str, Tree] = {}
    for name in names:
        *way, last = name.split(".")
        at: Any = found
        for part in way:
            at = at.setdefault(part, {})
            if isinstance(at, str):
                raise UsageError(f"{place}{at} is a tensor, and {name} leads into it")
        if last in at:
            raise UsageError(f"{place}{name} is a tensor, and others lead into it")
        at[last] = name
    for root, tree in found.items():
        _check_places(tree, root, place)
    return found


def _check_places(tree: Tree, name: str, place: str) -> None:
    if isinstance(tree, str):
        return
    if _is_tuple(tree) and set(tree) != set(map(str, range(len(tree)))):
        raise UsageError(f"{place}{name} has {', '.join(tree)}: give all, from {name}.0 on")
    for key, part in tree.items():
        _check_places(part, f"{name}.{key}", place)


def _is_tuple(tree: Mapping[str, Tree]) -> bool:
    return all(key.isdecimal() for key in tree)


def _leaves(trees: Mapping[str, Tree]) -> Iterable[str]:
    for tree in trees.values():
        if isinstance(tree, str):
            yield tree
        else:
            yield from _leaves(tree)


def _filled(tree: Tree, values: Mapping[str, Any]) -> Any:
    """An argument, made of values."""
    if isinstance(tree, str):
        return values[tree]
    if _is_tuple(tree):
        return tuple(_filled(tree[str(place)], values) for place in range(len(tree)))
    return Fields({key: _filled(part, values) for key, part in tree.items()})


def takes(module: nn.Module) -> str:
    """What its forward takes, for messages."""
    named = [
        p.name if p.default is p.empty else f"{p.name} (optional)"
        for p in inspect.signature(module.forward).parameters.values()
        if p.kind is not p.VAR_KEYWORD
    ]
    return ", ".join(named) or "nothing"


def _made(
    function: Function,
    trees: Mapping[str, Tree],
    names: Sequence[str],
    by_position: bool,
    own: int,
) -> Function:
    """The function, which takes the last of its arguments by position, as inputs that they are
    made of.

    Args:
        function: of a class or of an instance.
        trees: of those arguments, by their names.
        names: of the inputs, in order.
        by_position: whether the arguments go on so, and not by name.
        own: how many parameters it has without the module.
    """

    @functools.wraps(function)
    def called(*values: Any) -> Any:
        first = len(values) - len(names)
        given = dict(zip(names, values[first:], strict=True))
        made = {name: _filled(tree, given) for name, tree in trees.items()}
        if by_position:
            return function(*values[:first], *made.values())
        return function(*values[:first], **made)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    before = [*inspect.signature(function).parameters.values()]
    taken = before[: len(before) - own]
    taken += (inspect.Parameter(name, kind) for name in argument_names(names))
    called.__signature__ = inspect.Signature(taken)  # type: ignore[attr-defined]
    return called
