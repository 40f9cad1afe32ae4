"""Lightning `.ckpt`: a `state_dict` under attribute prefixes, hyperparameters, training state.

Averages that training made are candidates too. Lightning's own `WeightAveraging` callback (and
`EMAWeightAveraging`) puts the average into `state_dict` and the model's own weights beside it, as
`current_model_state`; `StochasticWeightAveraging` keeps the average in its state, and so do
callbacks of other packages, under names of their own.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fuseport.exporter.checkpoint.choice import shapes
from fuseport.exporter.checkpoint.content import (
    Candidate,
    Content,
    is_state_dict,
    show,
    state_dicts,
)
from fuseport.exporter.checkpoint.plain import TooLargeError, plain
from fuseport.exporter.errors import CorruptInput

__all__ = ["SIGNS", "recognise"]

_VERSION = "pytorch-lightning_version"
_HYPER = "hyper_parameters"
_CURRENT = "current_model_state"
_DEPTH = 4  # of state dicts inside a callback's state

SIGNS = (_VERSION, "state_dict")


def recognise(path: Path, loaded: Mapping[Any, Any]) -> Content | None:
    """The model's weights; `config` are the hyperparameters, as data.

    Raises:
        CorruptInput: no tensors in `state_dict`, or hyperparameters that nest without end.
    """
    weights = loaded.get("state_dict")
    if _VERSION not in loaded or not isinstance(weights, Mapping):
        return None
    if not is_state_dict(weights):
        raise CorruptInput(
            f"{show(path)}: state_dict: no tensors in it; give a checkpoint that holds weights"
        )
    try:
        hyper = plain(loaded.get(_HYPER) or {})
    except TooLargeError as error:
        raise CorruptInput(
            f"{show(path)}: {_HYPER}: {error}; save the checkpoint with plain hyperparameters"
        ) from error
    config = hyper if isinstance(hyper, dict) else {_HYPER: hyper}
    version = loaded[_VERSION]
    notes = (f"written by Lightning {show(version, 20)}",) if isinstance(version, str) else ()
    candidates = (*state_dicts(loaded, ("state_dict",)), *_averages(loaded))
    if _CURRENT in loaded:
        said = {
            "state_dict": "the average of WeightAveraging",
            _CURRENT: "the model's own, not averaged",
        }
        candidates = tuple(replace(c, what=said.get(c.name, c.what)) for c in candidates)
    return Content("lightning", candidates, config, notes=notes, why=SIGNS)


def _averages(loaded: Mapping[Any, Any]) -> list[Candidate]:
    """State dicts in the callbacks' state whose tensors are at least half of the model's."""
    callbacks = loaded.get("callbacks")
    if not isinstance(callbacks, Mapping):
        return []
    own = Counter(shapes(loaded["state_dict"]).values())
    found = []
    seen: set[int] = set()
    for key, state in callbacks.items():
        # "EMA{'decay': 0.99}": arguments follow the name where two of a class must be told apart.
        callback = key.partition("{")[0] if isinstance(key, str) else type(key).__name__
        for name, inner in _inner(state, f"callbacks.{callback}", 0, seen):
            common = own & Counter(shapes(inner).values())
            if 2 * common.total() >= own.total():
                found.append(Candidate(name, inner, "from a callback"))
    return found


def _inner(
    state: object, name: str, depth: int, seen: set[int]
) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    # Each is visited once: references that are shared on every level would multiply.
    if not isinstance(state, Mapping) or depth > _DEPTH or id(state) in seen:
        return
    seen.add(id(state))
    if state and all(isinstance(value, Tensor) for value in state.values()):
        if is_state_dict(state):
            yield name, state
        return
    for key, value in state.items():
        if isinstance(key, str):
            yield from _inner(value, f"{name}.{key}", depth + 1, seen)
