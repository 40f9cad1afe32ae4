"""Layouts that gradients of linear algebra, and of loops, take for granted.

What the turns of a `scan` carry, torch takes laid out as what the first is given, and gradients by
its solvers of linear systems have one column after the other.
"""

import copy
import importlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from fuseport.exporter.program import rebuilt
from fuseport.exporter.program.matching import mode_of
from fuseport.exporter.program.provenance import within
from fuseport.exporter.program.regions import graphs
from fuseport.exporter.program.sizes.of_graph import Sizes

__all__ = ["any_layouts", "contiguous_gradients", "contiguous_matrices"]

aten = torch.ops.aten

_SEPARATE, _BACKWARD = "_break_bw_input_output_aliasing", "call_backward"  # private
_DERIVE = "create_bw_fn"
_CHECK, _SHARED = "check_meta_consistency", "_check_alias_and_mutation"
_CONTIGUOUS: Any = {"memory_format": torch.contiguous_format}


_DETERMINANTS = {
    *(aten._linalg_det.default, aten._linalg_slogdet.default),
    *(aten.det.default, aten.linalg_det.default, aten.logdet.default),
    *(aten.slogdet.default, aten.linalg_slogdet.default),
}


def contiguous_matrices(exported: ExportedProgram, *, inside: bool = False) -> ExportedProgram:
    """A program whose determinants are of contiguous matrices, or those `inside` its regions alone.

    Of such torch has them by the factors of what is turned, of others not; and it differentiates
    either way alone, but layouts are not always those of the trace: not where a `scan` is
    differentiated, of which torch has the views as copies.
    """
    if not any(True for _ in _determinants(exported.graph_module, inside)):
        return exported
    module = copy.deepcopy(exported.graph_module)
    for part, node in [*_determinants(module, inside)]:
        call = Sizes(part.graph, mode_of(module.graph)).call
        matrices = call(node, aten.clone.default, node.args[0], **_CONTIGUOUS)
        within(matrices, node)
        node.args = (matrices,)
        part.recompile()
    return rebuilt(exported, module.graph, exported.graph_signature.input_specs)


def _determinants(module: fx.GraphModule, inside: bool) -> Iterator[tuple[fx.GraphModule, fx.Node]]:
    for part in graphs(module):
        if not (inside and part is module):
            for node in part.graph.nodes:
                if node.target in _DETERMINANTS and not _is_laid_out(node.args[0]):
                    yield part, node


def _is_laid_out(node: fx.Node) -> bool:
    return node.target is aten.clone.default and node.kwargs == _CONTIGUOUS


@contextmanager
def contiguous_gradients() -> Iterator[None]:
    """Within, gradients of scans are scans whose turns carry contiguous tensors, and branches have
    contiguous gradients, whose layouts torch wants alike."""
    scans: Any = importlib.import_module("torch._higher_order_ops.scan")  # a function has its name
    branches: Any = importlib.import_module("torch._higher_order_ops.cond")
    of: Any = getattr(scans, "ScanAutogradImpl", None)
    separate: Any = getattr(of, _SEPARATE, None)
    backward: Any = getattr(of, _BACKWARD, None)
    derive: Any = getattr(branches, _DERIVE, None)

    def separated(self: Any) -> None:
        separate(self)
        _lay_out(self.hop_partitioned_graph.bw_gm, len(self.init))

    def called(self: Any, *gradients: Any) -> Any:
        return backward(self, *map(_whole, gradients))

    def derived(*given: Any, **by: Any) -> Any:
        gradients = derive(*given, **by)
        return lambda *arguments: [*map(_whole, gradients(*arguments))]

    with ExitStack() as stack:  # another torch may lack one of them, which are private
        if separate is not None and backward is not None:
            instead: dict[str, Any] = {_SEPARATE: separated, _BACKWARD: called}
            stack.enter_context(mock.patch.multiple(of, **instead))
        if derive is not None:
            stack.enter_context(mock.patch.object(branches, _DERIVE, derived))
        yield


def _whole(value: Any) -> Any:
    return value.contiguous() if isinstance(value, Tensor) else value


@contextmanager
def any_layouts() -> Iterator[None]:
    """Within, a program is traced again for a format that has no layouts, whatever its scans carry,
    and no memory that what branches return could have in common.

    Where torch has copies of views in regions, which are contiguous, programs have views.
    """
    checks = {"torch._higher_order_ops.scan": _CHECK, "torch._higher_order_ops.utils": _SHARED}
    with ExitStack() as stack:
        for name, check in checks.items():
            module = importlib.import_module(name)
            if hasattr(module, check):  # another torch may have none
                stack.enter_context(mock.patch.object(module, check, return_value=None))
        yield


def _lay_out(turn: fx.GraphModule, count: int) -> None:
    """Have the first results of a turn be contiguous."""
    output = turn.graph.output_node()
    results: Any = output.args[0]
    laid_out = [_contiguous(turn.graph, node) for node in results[:count]]
    output.args = ((*laid_out, *results[count:]),)
    turn.graph.lint()
    turn.recompile()


def _contiguous(graph: fx.Graph, node: Any) -> Any:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, Tensor) or value.is_contiguous():
        return node
    with graph.inserting_before(graph.output_node()):
        made = graph.call_function(aten.clone.default, (node,), _CONTIGUOUS)
    made.meta = {**node.meta, "val": value.clone(**_CONTIGUOUS)}
    return made
