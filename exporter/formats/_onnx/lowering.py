"""Operators of a program, rewritten in terms of those that torch.onnx has forms of."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch._prims
from torch import Tensor, fx
from torch.export import ExportedProgram

from fuseport.exporter.formats._onnx.scalars import of_higher_rank
from fuseport.exporter.program import rebuilt
from fuseport.exporter.program.matching import mode_of
from fuseport.exporter.program.portable import computed_inside
from fuseport.exporter.program.rewriting import Rewriting, Table, Whole, is_composite
from fuseport.exporter.program.tracing import resized_to_one
from fuseport.exporter.program.tracing._layouts import any_layouts

__all__ = ["VALUE_OF", "Lowering", "rewritten"]

aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_RESHAPES = (aten.view.default, aten.reshape.default)
_VIEWS_OF_PRIMS = {
    getattr(torch.ops.prims, name).default: getattr(torch._prims, name).impl_aten
    for name in ("broadcast_in_dim", "collapse_view", "split_dim", "squeeze", "transpose")
}
"""What torch's own forms of operators have in them, and it refuses to trace beside regions."""
_SPLIT = {aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int}
"""What becomes one operator in regions, where one turn after another takes parts: see `_splits`."""
_LAYOUTS = {torch.ops.prims.copy_strided.default: lambda x, stride: x.clone()}
"""What they have in them of strides, of which ONNX knows nothing."""

VALUE_OF = "value_of"
"""The key in a node's `meta` under which stands which node of the program's own it is."""


class Lowering(ExportedProgram):
    """A program that decomposes in place: torch.onnx asks for that, of operators it has no form of.

    The original stays as it is.

    Attributes:
        lowered: what it became, once it was asked for.
    """

    lowered: ExportedProgram | None = None

    def __init__(self, exported: ExportedProgram, table: Table) -> None:
        """Take what is in `table`, too, and rather than what torch has for the same operator."""
        self.__dict__.update(exported.__dict__)
        self._own = {**_LAYOUTS, **table}

    def run_decompositions(
        self, decomp_table: Table | None = None, decompose_custom_triton_ops: bool = False
    ) -> ExportedProgram:
        """The program in terms of other operators, in one pass over its graph."""
        with resized_to_one():
            self.lowered = self._decomposed(dict(decomp_table or {}))
        return self.lowered

    def _decomposed(self, others: dict[Any, Callable[..., Any]]) -> ExportedProgram:
        mode = mode_of(self.graph)
        if not self.graph.find_nodes(op="get_attr"):
            try:
                return rewritten(self, _OfAnyRank(mode, {**others, **self._own}))
            except Whole:
                pass
        # Tracing the whole follows regions of the graph, and adds constants to a program.
        own = _OfAnyRank(mode, {**_VIEWS_OF_PRIMS, **self._own})
        inside = {**others, **{op: form for op, form in self._own.items() if op not in _SPLIT}}
        program = rewritten(self, own)
        # Torch leaves such operators in regions, whatever they are to become.
        composite = {op: form for op, form in self._own.items() if is_composite(op)}
        program._graph_module = computed_inside(program.graph_module, composite)
        with any_layouts():
            whole: ExportedProgram = program.run_decompositions(inside)
        return whole


class _OfAnyRank(Rewriting):
    """A graph in which operators are of the ranks that ONNX takes."""

    def form(self, node: fx.Node) -> Callable[..., Any] | None:
        """What computes the same as `node` does; None where that stays."""
        return of_higher_rank(node) or super().form(node)


def rewritten(exported: ExportedProgram, rewriting: Rewriting) -> ExportedProgram:
    """The program after all its nodes were rewritten."""
    graph = rewriting.graph
    rewriting.run(exported.graph)
    for old, new in rewriting.values.items():
        if isinstance(new, fx.Node):
            new.meta.setdefault(VALUE_OF, old.name)
    for node in [n for n in graph.nodes if n.target in _RESHAPES]:
        # Symbolic nodes are contiguous where ops are laid out like their inputs: a view may not fit
        # any more. ONNX Reshape does, but torch.onnx takes sizes of 0 for others in a reshape.
        with graph.inserting_before(node):
            (x,) = (n for n in node.all_input_nodes if isinstance(n.meta["val"], Tensor))
            contiguous = graph.call_function(
                aten.clone.default, (x,), {"memory_format": torch.contiguous_format}
            )
            contiguous.meta["val"] = x.meta["val"]
            node.replace_input_with(x, contiguous)
            node.target = aten.view.default
    _part_outputs(graph)
    # A new graph renames placeholders that are called like a builtin of Python's: `input` is.
    placeholders = graph.find_nodes(op="placeholder")
    inputs = [
        replace(spec, arg=replace(spec.arg, name=node.name))
        for spec, node in zip(exported.graph_signature.input_specs, placeholders, strict=True)
    ]
    return rebuilt(exported, graph, inputs)


def _part_outputs(graph: fx.Graph) -> None:
    """Outputs of a half type are copies: torch.onnx lets a reduction give float32, and casts that.

    What uses the reduction gets the cast's result, but what the program gives remains the first.
    """
    output = graph.output_node()
    for node in dict.fromkeys(output.all_input_nodes):
        value = node.meta["val"]
        if node.op != "placeholder" and isinstance(value, Tensor) and value.dtype in _HALF:
            with graph.inserting_before(output):
                copy = graph.call_function(aten.clone.default, (node,))
            copy.meta["val"] = value
            output.replace_input_with(node, copy)
