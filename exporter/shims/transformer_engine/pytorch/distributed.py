"""Checkpoints of activations, and names of what several processes share."""

from collections.abc import Callable
from typing import Any

from ._refused import Refused

__all__ = ["CudaRNGStatesTracker", "checkpoint"]

_OPTIONS = (
    "context_fn",
    "debug",
    "determinism_check",
    "distribute_saved_activations",
    "get_rng_state_tracker",
    "tp_group",
    "use_reentrant",
)


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The function's result; nothing is computed again for its gradient."""
    options = {name: value for name, value in kwargs.items() if name not in _OPTIONS}
    return function(*args, **options)


class CudaRNGStatesTracker(Refused):
    """Refuses to be made."""

    _why = "keeps random states of processes"
    _instead = "leave get_rng_state_tracker out"
