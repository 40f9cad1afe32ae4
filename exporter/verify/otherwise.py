"""Inputs by which a program goes both ways of each of its branches."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx

from fuseport.exporter.program import Program, TensorSpec
from fuseport.exporter.program.regions import COND, graphs

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


def of_all_ways(program: Program, inputs: Inputs) -> list[Inputs] | None:
    """Further inputs, of the same sizes, by which a program goes what ways others leave out.

    Args:
        program: of a forward.
        inputs: that it is run on besides.

    Returns:
        The inputs, none if there is no need; None if they are not found.
    """
    branches = {
        _code(getattr(part, node.args[1].target), getattr(part, node.args[2].target))
        for part in graphs(program.exported.graph_module)
        for node in part.graph.find_nodes(op="call_function", target=COND)
    }
    if not branches:
        return []
    module = program.exported.module(check_guards=False)
    assert isinstance(module, fx.GraphModule)
    came: dict[str, set[bool]] = defaultdict(set)
    _run(module, inputs, came)
    found: list[Inputs] = []
    for each in _others(program.inputs, inputs):
        if all(len(came[branch]) == 2 for branch in branches):
            return found
        if _run(module, each, came):
            found.append(each)
    return found if all(len(came[branch]) == 2 for branch in branches) else None


def _run(module: fx.GraphModule, inputs: Inputs, came: dict[str, set[bool]]) -> bool:
    """Note the ways that a program goes; whether that is news of one."""
    try:
        with _noted() as ways, torch.no_grad():
            module(*inputs.values())
    except Exception:  # an operator's, of such values or sizes
        return False
    news = [(branch, value) for branch, value in ways if value not in came[branch]]
    for branch, value in news:
        came[branch].add(value)
    return bool(news)


@contextmanager
def _noted() -> Iterator[list[tuple[str, bool]]]:
    """The branches that are come by meanwhile, and their ways."""
    kind: Any = type(COND)
    own: Any = kind.__call__
    found: list[tuple[str, bool]] = []

    def noting(cond: Any, predicate: Any, yes: Any, no: Any, *others: Any) -> Any:
        found.append((_code(yes, no), bool(predicate)))
        return own(cond, predicate, yes, no, *others)

    with mock.patch.object(kind, "__call__", noting):
        yield found


def _code(yes: fx.GraphModule, no: fx.GraphModule) -> str:
    """What a branch does, which copies of it do, too."""
    return yes.code + no.code


def _others(specs: Sequence[TensorSpec], inputs: Inputs) -> Iterator[Inputs]:
    floating = [spec.name for spec in specs if spec.floating]
    whole = [spec.name for spec in specs if not spec.floating]
    for change in _CHANGES if floating else ():
        yield {**inputs, **{name: change(inputs[name]) for name in floating}}
    for name in whole:
        for value in (inputs[name].amin(), inputs[name].amax()) if inputs[name].numel() else ():
            yield {**inputs, name: torch.full_like(inputs[name], value.item())}
