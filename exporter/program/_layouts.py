"""Layouts that gradients of linear algebra, and of loops, take for granted.

What the turns of a `scan` carry, torch takes laid out as what the first is given, and gradients by
its solvers of linear systems have one column after the other.
"""

import copy
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from fuseport.exporter.program import rebuilt
from fuseport.exporter.program._sizes import Sizes
from fuseport.exporter.program.matching import mode_of
from fuseport.exporter.program.provenance import within
from fuseport.exporter.program.regions import graphs

__all__ = ["any_layouts", "contiguous_carries", "contiguous_matrices"]

aten = torch.ops.aten

_SEPARATE, _BACKWARD = "_break_bw_input_output_aliasing", "call_backward"  # private
_CHECK = "check_meta_consistency"
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
def contiguous_carries() -> Iterator[None]:
    """Within, gradients of scans are scans whose turns carry contiguous tensors."""
    scans: Any = importlib.import_module("torch._higher_order_ops.scan")  # a function has its name
    of: Any = getattr(scans, "ScanAutogradImpl", None)
    separate: Callable[..., Any] | None = getattr(of, _SEPARATE, None)
    backward: Callable[..., Any] | None = getattr(of, _BACKWARD, None)
    if separate is None or backward is None:  # of another torch
        yield
        return

    def separated(self: Any) -> None:
        separate(self)
        _lay_out(self.hop_partitioned_graph.bw_gm, len(self.init))

    def called(self: Any, *gradients: Any) -> Any:
        return backward(self, *(g.contiguous() if isinstance(g, Tensor) else g for g in gradients))

    instead: dict[str, Any] = {_SEPARATE: separated, _BACKWARD: called}
    with mock.patch.multiple(of, **instead):
        yield


@contextmanager
def any_layouts() -> Iterator[None]:
    """Within, a program is traced again for a format that has no layouts, whatever its scans carry.

    Where torch has copies of views in regions, which are contiguous, programs have views.
    """
    scans: Any = importlib.import_module("torch._higher_order_ops.scan")
    if not hasattr(scans, _CHECK):  # of another torch
        yield
        return
    with mock.patch.object(scans, _CHECK, return_value=None):
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
