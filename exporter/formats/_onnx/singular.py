"""Factorisations of a program that raise nothing, and whose factors are those of what they say.

Where torch raises an error of a matrix that is singular, the program asserts that none is. Torch
has determinants of what is contiguous by the factors of what is turned, and their gradients take
that for granted.
"""

import copy
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from fuseport.exporter.program import rebuilt
from fuseport.exporter.program.matching import ASSERT, mode_of
from fuseport.exporter.program.provenance import within
from fuseport.exporter.program.sizes.of_graph import Sizes

__all__ = ["asserting_regular"]

aten = torch.ops.aten

_DEFINITE = "is not positive definite"
_REGULAR = "is singular"
_RAISING = {
    aten.inverse.default: (aten.linalg_inv_ex.default, _REGULAR),
    aten.linalg_cholesky.default: (aten.linalg_cholesky_ex.default, _DEFINITE),
    aten.linalg_inv.default: (aten.linalg_inv_ex.default, _REGULAR),
    aten.linalg_lu_factor.default: (aten.linalg_lu_factor_ex.default, _REGULAR),
    aten.linalg_solve.default: (aten.linalg_solve_ex.default, _REGULAR),
}
"""Composites, each with the operator that says in its last result what failed."""

_OLD_CHOLESKY = aten.cholesky.default if hasattr(aten, "cholesky") else None  # not in torch 2.14
if _OLD_CHOLESKY is not None:
    _RAISING[_OLD_CHOLESKY] = _RAISING[aten.linalg_cholesky.default]

_SAYING = {
    aten.linalg_cholesky_ex.default: _DEFINITE,
    aten.linalg_inv_ex.default: _REGULAR,
    aten.linalg_lu_factor_ex.default: _REGULAR,
    aten.linalg_solve_ex.default: _REGULAR,
}
_ERRORS = "check_errors"
_SOLVE = aten._linalg_solve_ex.default
_DETERMINANTS = (aten._linalg_det.default, aten._linalg_slogdet.default)
_CHECK = aten._linalg_check_errors.default
_KNOWN = {_CHECK, _SOLVE, *_DETERMINANTS, *_RAISING, *_SAYING}


def asserting_regular(exported: ExportedProgram) -> ExportedProgram:
    """A program with what has no layout in the place of what has one, and assertions.

    In regions nothing is asserted: what is computed of a singular matrix there is Inf or NaN.
    """
    parts = [m for m in exported.graph_module.modules() if isinstance(m, fx.GraphModule)]
    if not any(node.target in _KNOWN for node in _calls(*parts)):
        return exported
    module = copy.deepcopy(exported.graph_module)
    mode = mode_of(module.graph)
    for part in [m for m in module.modules() if isinstance(m, fx.GraphModule)]:
        for node in [*_calls(part)]:
            _Before(part.graph, node, mode, asserted=part is module).change()
        part.graph.lint()
        part.recompile()
    return rebuilt(exported, module.graph, exported.graph_signature.input_specs)


def _calls(*parts: fx.GraphModule) -> Iterator[fx.Node]:
    return (n for part in parts for n in part.graph.nodes if n.op == "call_function")


class _Before:
    """Puts nodes before one, which it changes."""

    def __init__(self, graph: fx.Graph, node: fx.Node, mode: Any, *, asserted: bool) -> None:
        self._graph, self._node, self._asserted = graph, node, asserted
        self._sizes = Sizes(graph, mode)

    def change(self) -> None:
        """Change the node, where there is something to change."""
        node = self._node
        if node.target in _RAISING:
            target, why = _RAISING[node.target]
            args, kwargs = node.args, dict(node.kwargs)
            if node.target is _OLD_CHOLESKY:
                args, kwargs = args[:1], {"upper": any(args[1:]) or kwargs.get("upper", False)}
            elif node.target is aten.linalg_cholesky.default:
                kwargs = {"upper": kwargs.get("upper", False)}
            *results, info = self._results(self._call(target, *args, **kwargs))
            self._assert(info, node.target, why)
            if len(results) > 1:
                self._replace(results)
            else:
                node.replace_all_uses_with(results[0])
                self._graph.erase_node(node)
        elif node.target in _SAYING and node.kwargs.get(_ERRORS):
            kwargs = {name: given for name, given in node.kwargs.items() if name != _ERRORS}
            results = self._results(self._call(node.target, *node.args, **kwargs))
            self._assert(results[-1], node.target, _SAYING[node.target])
            self._replace(results)
        elif node.target is _CHECK:
            info, name = self._first(), node.args[1]
            self._assert(info, name, _DEFINITE if "cholesky" in str(name) else _REGULAR)
            self._graph.erase_node(node)
        elif node.target in _DETERMINANTS and self._first().meta["val"].is_contiguous():
            node.args = (self._call(aten.transpose.int, self._first(), -2, -1),)
        elif node.target is _SOLVE and not any(user.args[1] in (1, 2) for user in node.users):
            call = self._call(aten.linalg_solve_ex.default, *node.args, **node.kwargs)
            result, info = self._results(call)
            self._replace([result, None, None, info])

    def _first(self) -> fx.Node:
        given = self._node.args[0]
        assert isinstance(given, fx.Node)
        return given

    def _replace(self, results: list[Any]) -> None:
        """Give these for what was taken of the node."""
        for user in [*self._node.users]:
            at: Any = user.args[1]
            user.replace_all_uses_with(results[at])
            self._graph.erase_node(user)
        self._graph.erase_node(self._node)

    def _results(self, call: fx.Node) -> list[fx.Node]:
        return [self._call(operator.getitem, call, i) for i in range(len(call.meta["val"]))]

    def _assert(self, info: fx.Node, name: Any, why: str) -> None:
        if not self._asserted:
            return
        fine = self._call(aten.all.default, self._call(aten.eq.Scalar, info, 0))
        name = (
            str(name).removeprefix("aten.").removesuffix(".default").replace("linalg_", "linalg.")
        )
        with self._graph.inserting_before(self._node):
            self._graph.call_function(ASSERT, (fine, f"{name}: a matrix {why}"))

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = self._sizes.call(self._node, target, *args, **kwargs)
        within(made, self._node)
        return made
