"""What stands for names of a package that runs on GPUs only."""

from collections.abc import Callable
from typing import Any, NoReturn, Self

__all__ = ["Placeholder", "refusing", "unusable"]


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


class _Unusable(type):
    """The class of classes that can be named in annotations, asked for and derived from alone."""

    def __getattr__(cls, name: str) -> type:
        return unusable(cls.__name__, name)

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        package = cls.__name__.partition(".")[0]
        raise NotImplementedError(
            f"{cls.__name__} was called, of which fuseport's stand-in for {package} has no form: "
            "leave it out of what is exported, or make it an op of your own (README, Ops of your "
            "own)"
        )


def unusable(owner: str, name: str) -> type:
    """A class, or function, of a package that has any, which refuses to be made or called.

    Args:
        owner: the module, or class, that it is of.
        name: of the class or function there.

    Raises:
        AttributeError: it is a name by which Python asks for something else.
    """
    if name.startswith("__"):
        raise AttributeError(f"{owner} has no attribute {name!r}")
    return _Unusable(f"{owner}.{name}", (), {})
