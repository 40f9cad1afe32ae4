"""Ranges of numbers that code makes tensors of, and lists of these: `torch.arange(1, 4).tolist()`.

To a capture they would be numbers that hang on values. A tensor keeps what it is for as long as
nothing else is called with it, which may write to it, by way of a view of it, too.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["forget", "known", "note"]

_ARGUMENTS = ("start", "end", "step")
_KEPT = "_fuseport_numbers"


def known(x: Tensor) -> list[int] | None:
    """The numbers of a range, or None where it is not known to be one."""
    kept: range | None = vars(x).get(_KEPT)
    return None if kept is None else list(kept)


def forget(args: tuple[Any, ...]) -> None:
    """What is done when something is called with these arguments."""
    if torch.compiler.is_dynamo_compiling():  # a way of a `cond`, whose tensors are its own
        return
    for given in args:
        if isinstance(given, Tensor):
            vars(given).pop(_KEPT, None)


def note(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], made: Any) -> None:
    """Keeps what a call has made, if it is a range of integers that are known."""
    if func is not torch.arange or not isinstance(made, Tensor) or made.is_floating_point():
        return
    names = ("end",) if len(args) == 1 else _ARGUMENTS
    given = {"start": 0, "step": 1, **dict(zip(names, args, strict=False)), **kwargs}
    numbers = [given.get(name) for name in _ARGUMENTS]
    if all(type(number) is int for number in numbers) and kwargs.get("out") is None:
        vars(made)[_KEPT] = range(*numbers)  # type: ignore[arg-type]
