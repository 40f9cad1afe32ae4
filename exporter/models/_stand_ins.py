"""Stand-ins for packages that model code imports when it is called, and not when it is imported."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from fuseport.exporter import shims
from fuseport.exporter.models._forward import rewrap

__all__ = ["call_under", "under"]


def call_under(module: nn.Module, stand_ins: Sequence[str]) -> None:
    """Have `module`, and copies that are made of it, be called with stand-ins on the import path.

    Args:
        module: its forward is replaced by one of the same signature.
        stand_ins: as of `shims.installed`; none, and nothing is replaced.
    """
    if stand_ins:
        rewrap(module, functools.partial(under, stand_ins))


def under(stand_ins: Sequence[str], function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, with stand-ins on the import path for the time of a call."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with shims.at_call(stand_ins):
            return function(*args, **kwargs)

    return called
