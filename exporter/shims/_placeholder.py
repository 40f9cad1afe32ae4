"""What stands for names of a package that runs on GPUs only."""

from typing import Self

__all__ = ["Placeholder"]


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
