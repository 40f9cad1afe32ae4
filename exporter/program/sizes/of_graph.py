"""Sizes of a graph, told by expressions."""

from collections.abc import Callable, Mapping
from typing import Any

import sympy  # type: ignore[import-untyped]  # it has no types
import torch
from torch import SymInt, Tensor, fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.proxy import GraphAppendingTracer, Proxy
from torch.utils import _pytree as pytree
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from fuseport.exporter.program.matching import evaluate

__all__ = ["Sizes", "Unlike", "examples_of", "expr_of", "is_size"]

aten = torch.ops.aten


class Unlike(Exception):
    """Turns of a loop are not alike: why."""


def expr_of(value: Any) -> Any:
    """A number or a size, or the node of one, as an expression."""
    value = value.meta["val"] if isinstance(value, fx.Node) else value
    return value.node.expr if isinstance(value, SymInt) else sympy.Integer(value)


def is_size(value: Any) -> bool:
    """Whether it is a number or a size, or the node of one."""
    value = value.meta.get("val") if isinstance(value, fx.Node) else value
    return isinstance(value, int | SymInt) and not isinstance(value, bool)


def examples_of(env: ShapeEnv) -> Mapping[sympy.Symbol, Any]:
    """What inputs' sizes are in the example, by symbol."""
    found: Any = getattr(env, "backed_var_to_val", None) or env.var_to_val  # by torch's version
    return found  # type: ignore[no-any-return]


class Sizes:
    """Makes nodes of sizes.

    Args:
        graph: in which.
        mode: of its fakes.
        given: a symbol's node in the graph; None where that is a size of a tensor there.
    """

    def __init__(
        self, graph: fx.Graph, mode: Any, given: Callable[[Any], fx.Node] | None = None
    ) -> None:
        self._graph, self.mode, self._given = graph, mode, given

    def value(self, expr: Any) -> Any:
        """What a size is in the trace."""
        if expr.is_Integer:
            return int(expr)
        return self.mode.shape_env.create_symintnode(expr, hint=None)

    def node(self, expr: Any, before: fx.Node) -> Any:
        """A number, or a node of a size that stands before another node.

        Raises:
            Unlike: nothing there has such sizes.
        """
        if expr.is_Integer:
            return int(expr)
        tracer = GraphAppendingTracer(self._graph)
        symbols = {symbol: self._symbol(symbol, before) for symbol in expr.free_symbols}
        last = before.prev
        with self._graph.inserting_before(before):
            proxies = {symbol: Proxy(node, tracer) for symbol, node in symbols.items()}
            made: fx.Node = sympy_interp(PythonReferenceAnalysis, proxies, expr).node
        while last.next is not before:
            last = last.next
            evaluate(last, self.mode)
        return made

    def _symbol(self, symbol: Any, before: fx.Node) -> fx.Node:
        if self._given is not None:
            return self._given(symbol)
        for node in self._graph.nodes:
            if node is before:
                break
            value = node.meta.get("val")
            for dim, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
                if isinstance(size, SymInt) and size.node.expr == symbol:
                    return self.call(before, aten.sym_size.int, node, dim)
        raise Unlike("a size in it hangs on values")

    def call(self, before: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Call an operator before a node; sizes among its arguments may be expressions."""
        args, kwargs = pytree.tree_map(
            lambda each: self.node(each, before) if isinstance(each, sympy.Basic) else each,
            (args, kwargs),
        )
        with self._graph.inserting_before(before):
            made = self._graph.call_function(target, args, kwargs)
        evaluate(made, self.mode)
        return made
