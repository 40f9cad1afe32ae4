"""What regions take, leave and compute, as real numbers.

Torch differentiates a scan only if all that its turns leave is real. Integers and Booleans have no
gradient; as real numbers they keep their values, and have one of zeros. Complex numbers have none
in regions, of whose views torch makes copies without a derivative, and ONNX has no such numbers:
they go in and out with their parts side by side, as `torch.view_as_real` has them, and are two
values inside.
"""

import copy
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from fuseport.exporter.program import rebuilt
from fuseport.exporter.program.complex_numbers.complex_forms import FORMS, as_it_is
from fuseport.exporter.program.complex_numbers.in_parts import has_complex, inside_in_parts
from fuseport.exporter.program.loops._first_states import with_gradients
from fuseport.exporter.program.matching import mode_of
from fuseport.exporter.program.provenance import within
from fuseport.exporter.program.regions import SCAN, added, graphs, regions
from fuseport.exporter.program.rewriting import Table
from fuseport.exporter.program.sizes.of_graph import Sizes
from fuseport.exporter.program.tracing import any_sizes

__all__ = ["differentiable", "real_regions"]

aten = torch.ops.aten

_HALF = 2**32  # a float64 has either half of any int64 exactly
_TRANSFORMS = (aten._fft_r2c.default, aten._fft_c2c.default, aten._fft_c2r.default)

_Which = Callable[[Tensor], bool]


def differentiable(exported: ExportedProgram) -> ExportedProgram:
    """A program of which torch can differentiate each `scan`: the one given, where it can.

    Raises:
        ExportFailed: there is no form of an operator of complex numbers.
    """
    forms = {**FORMS, **{op: as_it_is(op) for op in _TRANSFORMS}}
    return with_gradients(_changed(exported, lambda x: not x.is_floating_point(), forms))


def real_regions(exported: ExportedProgram, forms: Table) -> ExportedProgram:
    """A program in whose regions are no complex numbers: the one given, if so.

    Args:
        exported: stays as it is.
        forms: of operators, by parts.

    Raises:
        ExportFailed: there is none of an operator.
    """
    return _changed(exported, Tensor.is_complex, forms)


def _changed(exported: ExportedProgram, which: _Which, forms: Table) -> ExportedProgram:
    """With reals for complex numbers, and for what of `which` turns leave."""
    if not any(_is_changed(*found, which) for found in _calls(exported.graph_module)):
        return exported
    module = copy.deepcopy(exported.graph_module)
    mode = mode_of(module.graph)
    with any_sizes():
        for part, call in [*_calls(module)][::-1]:  # those inside first
            if _is_changed(part, call, which):
                _of_reals(part, call, mode, which, forms)
    for part in graphs(module):
        part.graph.lint()
        part.recompile()
    return rebuilt(exported, module.graph, exported.graph_signature.input_specs)


def _calls(module: fx.GraphModule) -> Iterator[tuple[fx.GraphModule, fx.Node]]:
    """All calls of regions in a graph and those inside, beside the graph that each is in."""
    for part in graphs(module):
        yield from ((part, call) for call in regions(part.graph) if _inside(part, call))


def _inside(part: fx.GraphModule, call: fx.Node) -> dict[fx.Node, fx.GraphModule]:
    """The graphs that a node calls, by what they are in its arguments."""
    taken = [node for node in call.all_input_nodes if node.op == "get_attr"]
    found = {node: getattr(part, str(node.target), None) for node in taken}
    return {node: each for node, each in found.items() if isinstance(each, fx.GraphModule)}


def _is_changed(part: fx.GraphModule, call: fx.Node, which: _Which) -> bool:
    bodies = _inside(part, call).values()
    if has_complex(call) or any(has_complex(node) for body in bodies for node in body.graph.nodes):
        return True
    return call.target is SCAN and any(which(value) for value in call.meta["val"])


def _of_reals(part: fx.GraphModule, call: fx.Node, mode: Any, which: _Which, forms: Table) -> None:
    """Put a call of real numbers in the place of one, and what is made of them in that of its."""
    turns = call.target is SCAN
    which = which if turns else Tensor.is_complex
    convert = _Converter(part.graph, mode, call, which)
    states: Any = call.args[1] if turns else ()
    inside: dict[fx.Node, fx.Node] = {}
    for taken, body in _inside(part, call).items():
        changed = copy.deepcopy(body)  # another call may have the same
        name = added(part, changed, "of_reals")
        _change(changed.graph, len(states), mode, which)
        inside_in_parts(changed, mode, forms)
        with part.graph.inserting_before(call):
            inside[taken] = part.graph.get_attr(name)

    def real(node: fx.Node) -> fx.Node:
        return inside[node] if node in inside else convert.pairs(node)

    args = [*fx.node.map_arg(call.args, real)]
    if turns:
        args[1] = [each for state in states for each in convert.reals(state)]
    made = convert.called(call.target, tuple(args), call.kwargs)
    values: list[Tensor] = []
    for at, value in enumerate(call.meta["val"]):
        places = range(len(values), len(values) + _width(value, which))
        with mode:
            values += [_real(value, which) for _ in places]
        made.meta["val"] = tuple(values)
        for taken in [user for user in call.users if user.args[1] == at]:
            reals = [convert.call(operator.getitem, made, place) for place in places]
            taken.replace_all_uses_with(convert.original(reals, value))
            part.graph.erase_node(taken)
    part.graph.erase_node(call)
    for before in inside:
        if not before.users:
            part.graph.erase_node(before)


def _change(graph: fx.Graph, count: int, mode: Any, which: _Which) -> None:
    """Have a region, of so many states, take real numbers, and leave such."""
    placeholders, output = graph.find_nodes(op="placeholder"), graph.output_node()
    first = next(node for node in graph.nodes if node.op != "placeholder")
    convert = _Converter(graph, mode, first, which)
    for i, taken in enumerate(placeholders):
        value = taken.meta["val"]
        if not (_is_complex(taken) or (i < count and which(value))):
            continue
        reals = []
        for part in range(_width(value, which)):
            with graph.inserting_before(taken), mode:
                reals.append(graph.placeholder(f"{taken.name}_real_{part}"))
                reals[-1].meta["val"] = _real(value, which)
        taken.replace_all_uses_with(convert.original(reals, value))
        graph.erase_node(taken)
    convert = _Converter(graph, mode, output, which)
    left: Any = output.args[0]
    output.args = (tuple(real for node in left for real in convert.reals(node)),)


def _is_complex(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_complex()


def _real(value: Tensor, which: _Which) -> Tensor:
    """What has the shape and dtype of the real numbers that it is taken as."""
    if value.is_complex():
        return torch.view_as_real(value.resolve_conj())
    return value.double() if which(value) else value


def _width(value: Tensor, which: _Which) -> int:
    """As how many real numbers it is taken."""
    return 2 if value.dtype is torch.int64 and which(value) else 1


class _Converter:
    """Makes nodes of a graph that stand before one, and belong to its layer."""

    def __init__(self, graph: fx.Graph, mode: Any, before: fx.Node, which: _Which) -> None:
        self._graph, self._before, self._which = graph, before, which
        self._sizes = Sizes(graph, mode)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = self._sizes.call(self._before, target, *args, **kwargs)
        within(made, self._before)
        return made

    def called(self, target: Any, args: Any, kwargs: Any) -> fx.Node:
        """A call of regions, of which nothing is computed here."""
        with self._graph.inserting_before(self._before):
            made = self._graph.call_function(target, args, kwargs)
        within(made, self._before)
        return made

    def pairs(self, node: fx.Node) -> fx.Node:
        """What a node is with the parts of complex numbers side by side, and nothing of it."""
        if not _is_complex(node):
            return node
        whole = self.call(aten.resolve_conj.default, node)
        return self.call(aten.clone.default, self.call(aten.view_as_real.default, whole))

    def reals(self, node: fx.Node) -> list[fx.Node]:
        """What a node is as real numbers."""
        value = node.meta["val"]
        if value.is_complex() or not self._which(value):
            return [self.pairs(node)]
        parts = [node]
        if value.dtype is torch.int64:
            high = self.call(aten.div.Tensor_mode, node, _HALF, rounding_mode="floor")
            low = self.call(aten.sub.Tensor, node, self.call(aten.mul.Tensor, high, _HALF))
            parts = [high, low]
        return [self.call(aten.to.dtype, each, torch.float64) for each in parts]

    def original(self, reals: Sequence[fx.Node], value: Tensor) -> fx.Node:
        """What has that value, of its real numbers."""
        if value.is_complex():
            return self.call(aten.view_as_complex.default, reals[0])
        if not self._which(value):
            return reals[0]
        if value.dtype is torch.bool:
            return self.call(aten.ne.Scalar, reals[0], 0)
        first, *others = (self.call(aten.to.dtype, each, value.dtype) for each in reals)
        for low in others:
            first = self.call(aten.add.Tensor, self.call(aten.mul.Tensor, first, _HALF), low)
        return first
