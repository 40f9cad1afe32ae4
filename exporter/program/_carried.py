"""Integers that the turns of a `scan` leave, as real numbers.

Torch differentiates a scan only if all that its turns leave is real. Integers and Booleans have no
gradient; as real numbers they keep their values, and have one of zeros.
"""

import copy
import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from fuseport.exporter.program import rebuilt
from fuseport.exporter.program._sizes import Sizes
from fuseport.exporter.program.matching import mode_of
from fuseport.exporter.program.provenance import within

__all__ = ["differentiable"]

aten = torch.ops.aten

_SCAN = torch.ops.higher_order.scan
_HALF = 2**32  # a float64 has either half of any int64 exactly


def differentiable(exported: ExportedProgram) -> ExportedProgram:
    """A program of which torch can differentiate each `scan`: the one given, where it can."""
    if not any(_leaves_integers(*found) for found in _scans(exported.graph_module)):
        return exported
    module = copy.deepcopy(exported.graph_module)
    for part, scan in [*_scans(module)][::-1]:  # those inside first
        if _leaves_integers(part, scan):
            _of_reals(part, scan, mode_of(module.graph))
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            part.graph.lint()
            part.recompile()
    return rebuilt(exported, module.graph, exported.graph_signature.input_specs)


def _scans(module: fx.GraphModule) -> Iterator[tuple[fx.GraphModule, fx.Node]]:
    """All in a graph and those inside, beside the graph that each is in."""
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.find_nodes(op="call_function", target=_SCAN):
                yield part, node


def _body(part: fx.GraphModule, scan: fx.Node) -> Any:
    region: Any = scan.args[0]
    return part.get_submodule(region.target)


def _leaves_integers(part: fx.GraphModule, scan: fx.Node) -> bool:
    results: Any = _body(part, scan).graph.output_node().args[0]
    return not all(_is_real(node.meta["val"]) for node in results)


def _is_real(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _of_reals(part: fx.GraphModule, scan: fx.Node, mode: Any) -> None:
    """Put a scan of real numbers in the place of one, and what is made of them in that of its."""
    given: Any = scan.args
    before, states, *others = given
    body = copy.deepcopy(_body(part, scan))  # another scan may have the same
    names = (f"of_reals_{i}" for i in itertools.count())
    name = next(each for each in names if not hasattr(part, each))
    part.add_submodule(name, body)
    _change(body.graph, len(states), mode)
    convert = _Converter(part.graph, mode, scan)
    firsts = [real for state in states for real in convert.reals(state)]
    with part.graph.inserting_before(scan):
        region = part.graph.get_attr(name)
        made = part.graph.call_function(_SCAN, (region, firsts, *others))
    within(made, scan)
    values: list[Tensor] = []
    for at, value in enumerate(scan.meta["val"]):
        places = range(len(values), len(values) + _width(value))
        values += [value if _is_real(value) else value.double() for _ in places]
        made.meta["val"] = tuple(values)
        for taken in [user for user in scan.users if user.args[1] == at]:
            reals = [convert.call(operator.getitem, made, place) for place in places]
            taken.replace_all_uses_with(convert.original(reals, value))
            part.graph.erase_node(taken)
    part.graph.erase_node(scan)
    if not before.users:
        part.graph.erase_node(before)


def _change(graph: fx.Graph, count: int, mode: Any) -> None:
    """Have a turn, of so many states, take real numbers for them, and leave such."""
    placeholders, output = graph.find_nodes(op="placeholder"), graph.output_node()
    first = next(node for node in graph.nodes if node.op != "placeholder")
    convert = _Converter(graph, mode, first)
    for state in placeholders[:count]:
        value = state.meta["val"]
        if _is_real(value):
            continue
        reals = []
        for i in range(_width(value)):
            with graph.inserting_before(state):
                reals.append(graph.placeholder(f"{state.name}_real_{i}"))
            reals[-1].meta["val"] = value.double()
        state.replace_all_uses_with(convert.original(reals, value))
        graph.erase_node(state)
    convert = _Converter(graph, mode, output)
    left: Any = output.args[0]
    output.args = (tuple(real for node in left for real in convert.reals(node)),)


def _width(value: Tensor) -> int:
    """As how many real numbers it is taken."""
    return 2 if value.dtype is torch.int64 else 1


class _Converter:
    """Makes nodes of a graph that stand before one, and belong to its layer."""

    def __init__(self, graph: fx.Graph, mode: Any, before: fx.Node) -> None:
        self._sizes, self._before = Sizes(graph, mode), before

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = self._sizes.call(self._before, target, *args, **kwargs)
        within(made, self._before)
        return made

    def reals(self, node: fx.Node) -> list[fx.Node]:
        """What a node is as real numbers."""
        value = node.meta["val"]
        if _is_real(value):
            return [node]
        parts = [node]
        if value.dtype is torch.int64:
            high = self.call(aten.div.Tensor_mode, node, _HALF, rounding_mode="floor")
            low = self.call(aten.sub.Tensor, node, self.call(aten.mul.Tensor, high, _HALF))
            parts = [high, low]
        return [self.call(aten.to.dtype, each, torch.float64) for each in parts]

    def original(self, reals: Sequence[fx.Node], value: Tensor) -> fx.Node:
        """What has that value, of its real numbers."""
        if _is_real(value):
            return reals[0]
        if value.dtype is torch.bool:
            return self.call(aten.ne.Scalar, reals[0], 0)
        first, *others = (self.call(aten.to.dtype, each, value.dtype) for each in reals)
        for low in others:
            first = self.call(aten.add.Tensor, self.call(aten.mul.Tensor, first, _HALF), low)
        return first
