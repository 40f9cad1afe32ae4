"""Names of mixed precision: decorators that change nothing here, and what trains."""

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from ._refused import refuse

__all__ = [
    "float_function",
    "half_function",
    "initialize",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
]

Function = TypeVar("Function", bound=Callable[..., Any])


def half_function(fn: Function) -> Function:
    """The function itself, as in apex before `initialize`."""
    return fn


float_function = promote_function = half_function


def register_half_function(module: Any, name: str) -> None:
    """Nothing, as in apex before `initialize`."""


register_float_function = register_promote_function = register_half_function


def initialize(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuses: it trains."""
    refuse("amp.initialize")


def scale_loss(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuses: it trains."""
    refuse("amp.scale_loss")
