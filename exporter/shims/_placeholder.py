"""What stands for names of a package that runs on GPUs only."""

from collections.abc import Callable
from typing import Any, NoReturn, Self

__all__ = ["Placeholder", "refusing"]


class Placeholder:
    """Something of a package's that code may name and look into.

    Args:
        name: in full, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Self:
        if name.startswith("__"):
            raise AttributeError(f"{self._name} has no attribute {name!r}")
        return type(self)(f"{self._name}.{name}")

    def __repr__(self) -> str:
        return f"<stand-in of {self._name}>"


def refusing(module: str, name: str, reason: str) -> Callable[..., NoReturn]:
    """A function of a module that has any, which refuses to be called.

    Args:
        module: what it is of.
        name: of the function.
        reason: what it says of itself when it is called.

    Raises:
        AttributeError: it is a name by which Python asks a module for something else.
    """
    if name.startswith("__"):
        raise AttributeError(f"{module} has no attribute {name!r}")

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(reason)

    return refuse
