"""Inputs for which a model that decides by values goes other ways than by those that are drawn."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from fuseport.exporter.capture import went
from fuseport.exporter.models.model import Model
from fuseport.exporter.program import TensorSpec

__all__ = ["of_all_ways"]

Inputs = Mapping[str, Tensor]

_FAR = 16.0  # standard deviations

_CHANGES: tuple[Callable[[Tensor], Tensor], ...] = (  # of what is drawn from a normal distribution
    torch.neg,
    lambda x: x + _FAR,
    lambda x: x - _FAR,
    lambda x: x * _FAR,
    lambda x: x / _FAR,
    torch.zeros_like,
)


def of_all_ways(model: Model, inputs: Inputs, places: Iterable[str]) -> list[Inputs] | None:
    """Further inputs, of the same sizes, for decisions to come to both values at each place.

    Args:
        model: that decides.
        inputs: that it is run on besides.
        places: of its decisions, `file:line`.

    Returns:
        The inputs, none if there is no need; None if they are not found.
    """
    came: dict[str, set[bool]] = defaultdict(set)
    _note(model, inputs, came)
    found: list[Inputs] = []
    for each in _others(model.inputs, inputs):
        if all(len(came[place]) == 2 for place in places):
            return found
        if _note(model, each, came):
            found.append(each)
    return found if all(len(came[place]) == 2 for place in places) else None


def _note(model: Model, inputs: Inputs, came: dict[str, set[bool]]) -> bool:
    """Note what the decisions come to; whether that is news of one."""
    try:
        made, _ = went(model, inputs, {})
    except Exception:  # the model's own, of such values
        return False
    before = sum(map(len, came.values()))
    for decision in made:
        came[decision.place].add(decision.value)
    return sum(map(len, came.values())) > before


def _others(specs: Iterable[TensorSpec], inputs: Inputs) -> Iterator[Inputs]:
    floating = [spec.name for spec in specs if spec.floating]
    whole = [spec.name for spec in specs if not spec.floating]
    for change in _CHANGES if floating else ():
        yield {**inputs, **{name: change(inputs[name]) for name in floating}}
    for name in whole:
        for value in (inputs[name].amin(), inputs[name].amax()) if inputs[name].numel() else ():
            yield {**inputs, name: torch.full_like(inputs[name], value.item())}
