"""Functions that model code has compiled or caches, `@torch.compile`, `@lru_cache`, as they are.

A capture sees through what is compiled by itself. Where the model is run, for its truth in float64
and as what artifacts are compared with, a compiler of a minute's work and of roundings of its own
is not meant. A cache has no place for a size that is dynamic: tables of sizes are made anew.
"""

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from torch import nn

from fuseport.exporter.user_code import flex_attention

__all__ = ["called_plainly"]

_Place = tuple[Any, str, Any]
"""Of a name: whose it is, a class or a dictionary; and what it had."""

_FUNCTIONS = (FunctionType, functools._lru_cache_wrapper)
_calls = threading.RLock()


def called_plainly(module: nn.Module) -> Callable[[Callable[..., Any]], Callable[..., Any]] | None:
    """What to wrap the module's forward in, a function with the module first; None: in nothing.

    Args:
        module: whose classes, attributes and files of code may have names of such functions, and of
            torch's `flex_attention`, in whose place is ours.
    """
    if not any(_places(module)):
        return None

    def wrap(forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with _calls, _plain(self):
                return forward(self, *args, **kwargs)

        return called

    return wrap


@contextmanager
def _plain(module: nn.Module) -> Iterator[None]:
    places = list(_places(module))
    try:
        for owner, name, function in places:
            _put(owner, name, _inside(function))
        yield
    finally:
        for owner, name, function in places:
            _put(owner, name, function)


def _places(module: nn.Module) -> Iterator[_Place]:
    classes: dict[type, None] = {}
    for part in module.modules():
        classes |= dict.fromkeys(type(part).__mro__)
        yield from _in(vars(part))
    own = [cls for cls in classes if cls.__module__.partition(".")[0] not in ("torch", "builtins")]
    for cls in own:
        yield from _in(cls)
    for name in dict.fromkeys(cls.__module__ for cls in own):
        if name in sys.modules:
            yield from _in(vars(sys.modules[name]))


def _in(owner: Any) -> Iterator[_Place]:
    for name, value in list(_of(owner).items()):
        if isinstance(value, _FUNCTIONS) and _inside(value) is not value:
            yield owner, name, value


def _of(owner: Any) -> Mapping[str, Any]:
    return vars(owner) if isinstance(owner, type) else owner


def _put(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, type):
        setattr(owner, name, value)
    else:
        owner[name] = value


def _inside(function: Any) -> Any:
    """What a compiled or caching function is of; and what is in the place of torch's own."""
    while isinstance(function, _FUNCTIONS):
        cached = isinstance(function, functools._lru_cache_wrapper)
        inside = vars(function).get("__wrapped__" if cached else "_torchdynamo_orig_callable")
        if inside is None:
            break
        function = inside
    return flex_attention.ours(function)
