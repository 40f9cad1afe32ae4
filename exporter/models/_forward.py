"""A module's forward: which inputs it takes, and others in its place."""

import functools
import inspect
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, Protocol, TypeVar

from torch import nn

from fuseport.exporter.errors import UsageError

__all__ = ["ordered", "rewrap", "takes"]

Function = Callable[..., Any]


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
    only be; if forward takes `*args`, they are as they are given. Where arguments without a value
    come between them, or some go by keyword only, forward is replaced by one that takes just these.

    Args:
        module: the user's.
        inputs: of its forward.
        place: where they come from, as messages begin.

    Raises:
        UsageError: names are not of forward's parameters, or some that have no default are missing.
    """
    parameters = inspect.signature(module.forward).parameters
    kinds = {p.kind for p in parameters.values()}
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return tuple(inputs)
    named = [p for p in parameters.values() if p.kind is not p.VAR_KEYWORD]
    needed = [p.name for p in named if p.default is p.empty]
    given = {spec.name: spec for spec in inputs}
    if len(given) == 1 and not given.keys() & parameters.keys() and len(needed or named) == 1:
        return tuple(inputs)
    order = [p.name for p in named if p.name in given]
    unknown = [name for name in given if name not in order]
    missing = [name for name in needed if name not in given]
    if (unknown and inspect.Parameter.VAR_KEYWORD not in kinds) or missing:
        wrong = [f"{name} is none of them" for name in unknown]
        wrong += [f"{name} is missing" for name in missing]
        raise UsageError(
            f"{place}{', '.join(given)} given, and the model's forward takes {takes(module)}: "
            f"{', '.join(wrong)}"
        )
    order += unknown
    positional = [p.name for p in named if p.kind is not p.KEYWORD_ONLY]
    if order != positional[: len(order)]:
        rewrap(module, functools.partial(_by_keyword, names=order, own=len(parameters)))
    return tuple(given[name] for name in order)


def takes(module: nn.Module) -> str:
    """What its forward takes, for messages."""
    named = [
        p.name if p.default is p.empty else f"{p.name} (optional)"
        for p in inspect.signature(module.forward).parameters.values()
        if p.kind is not p.VAR_KEYWORD
    ]
    return ", ".join(named) or "nothing"


def _by_keyword(function: Function, names: Sequence[str], own: int) -> Function:
    """The function, which takes the last of its arguments by position, and passes them by name.

    Args:
        function: of a class or of an instance.
        names: of those arguments.
        own: how many parameters it has without the module.
    """

    @functools.wraps(function)
    def called(*values: Any) -> Any:
        first = len(values) - len(names)
        return function(*values[:first], **dict(zip(names, values[first:], strict=True)))

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    before = [*inspect.signature(function).parameters.values()]
    taken = [*before[: len(before) - own], *(inspect.Parameter(name, kind) for name in names)]
    called.__signature__ = inspect.Signature(taken)  # type: ignore[attr-defined]
    return called
