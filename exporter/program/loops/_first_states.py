"""First states of loops that have a gradient, though it goes nowhere.

Where the first state of a `scan` has none, as zeros have none, torch before 2.13 takes it that what
the turns leave of it has none either: gradients of all turns but the last are lost.
"""

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor, fx
from torch.export import ExportedProgram

from fuseport.exporter.program import rebuilt
from fuseport.exporter.program.matching import mode_of
from fuseport.exporter.program.provenance import within
from fuseport.exporter.program.regions import scans
from fuseport.exporter.program.sizes.of_graph import Sizes

__all__ = ["chosen_beside", "with_gradients"]

aten = torch.ops.aten

_KNOWN = Version("2.13")


def with_gradients(exported: ExportedProgram) -> ExportedProgram:
    """A program whose first states have gradients where something else of a `scan` has: the one
    given, where torch needs none."""
    if Version(torch.__version__) >= _KNOWN or not any(scans(exported.graph_module)):
        return exported
    module = copy.deepcopy(exported.graph_module)
    mode = mode_of(module.graph)
    for part, scan in [*scans(module)]:
        _anchor(Sizes(part.graph, mode), scan)
        part.recompile()
    return rebuilt(exported, module.graph, exported.graph_signature.input_specs)


def _anchor(sizes: Sizes, scan: fx.Node) -> None:
    body, states, slices, others = scan.args
    given: Any = (*slices, *others)  # type: ignore[misc]
    scan.args = (body, chosen_beside(sizes, scan, states, given), slices, others)


def chosen_beside(sizes: Sizes, loop: fx.Node, states: Any, given: Sequence[Any]) -> list[Any]:
    """The first states of a loop, with a gradient where something of what is given has one: each
    is chosen beside what hangs on all of that."""

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = sizes.call(loop, target, *args, **kwargs)
        within(made, loop)
        return made

    sums = [call(aten.sum.default, each) for each in given if _is_floating(each)]
    if not sums:
        return [*states]
    double = [call(aten.to.dtype, each, torch.float64) for each in sums]
    anchor = functools.reduce(lambda a, b: call(aten.add.Tensor, a, b), double)

    def chosen(state: Any) -> Any:
        if not _is_floating(state):
            return state
        value = state.meta["val"]
        never = call(aten.full.default, [], False, dtype=torch.bool, device=value.device)
        return call(aten.where.self, never, call(aten.to.dtype, anchor, value.dtype), state)

    return [chosen(state) for state in states]


def _is_floating(given: Any) -> bool:
    value = given.meta["val"] if isinstance(given, fx.Node) else given
    return isinstance(value, Tensor) and value.is_floating_point()
