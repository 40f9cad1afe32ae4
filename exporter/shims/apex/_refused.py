"""What of the package trains."""

from typing import Any, NoReturn

__all__ = ["ForTraining", "refuse"]


class ForTraining:
    """A class that can be imported and named, and refuses to be made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse(type(self).__name__)


def refuse(name: str) -> NoReturn:
    """Raises NotImplementedError, with the name that was called."""
    raise NotImplementedError(
        f"apex's {name} was called, which trains, and which fuseport's stand-in for apex does not "
        "have: call it in your training script, not where the model is made or called"
    )
