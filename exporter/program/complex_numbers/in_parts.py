"""Graphs without complex numbers: each is two values there, its real and its imaginary part."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.program.complex_numbers.complex_forms import Complex, as_it_is, is_complex
from fuseport.exporter.program.regions import view_of
from fuseport.exporter.program.rewriting import Rewriting, Table, is_composite

__all__ = ["InParts", "composites", "has_complex", "inside_in_parts"]

aten = torch.ops.aten

_SIZES = (aten.sym_size.int, aten.sym_numel.default)


def inside_in_parts(part: fx.GraphModule, mode: Any, forms: Table) -> None:
    """Have the graph of a region be without complex numbers; it takes and leaves none.

    Raises:
        ExportFailed: there is no form of an operator.
    """
    if not any(has_complex(node) for node in part.graph.nodes):
        return
    if composite := composites(part.graph, forms):
        whole = Rewriting(mode, composite)
        whole.run(part.graph)
        part.graph = whole.graph
    parts = InParts(mode, forms)
    parts.run(part.graph)
    part.graph = parts.graph


def composites(graph: fx.Graph, forms: Table) -> Table:
    """Operators of complex numbers in a graph that have no form, but one by other operators."""
    return {
        node.target: node.target.decompose
        for node in graph.nodes
        if is_composite(node.target) and has_complex(node) and _named(node) not in forms
    }


class InParts(Rewriting):
    """A graph in which complex values are two values each."""

    def __init__(self, mode: Any, forms: Table) -> None:
        """Begin with a graph that is empty, of fakes of a mode, with forms of operators."""
        super().__init__(mode, {})
        self._forms = forms

    def of(self, node: fx.Node) -> Any:
        """What `node` becomes; parts that are put side by side and taken again are left apart."""
        args: Any = node.args
        first: Any = args[0] if args else None
        if node.target is aten._assert_tensor_metadata.default and has_complex(node):
            return None  # as of `z.to(x.device)`: it was seen to in the capture
        z = self.values.get(first) if isinstance(first, fx.Node) else None
        if isinstance(z, Complex) and node.target is aten.sym_size.int:
            return self._size(z.re, args[1])  # type: ignore[arg-type]
        if isinstance(z, Complex) and node.target is aten.sym_numel.default:
            return self._count(z.re)  # type: ignore[arg-type]
        if node.target is aten.select.int and first.target is aten.view_as_real.default:
            seen = self.values[first.args[0]]
            if isinstance(seen, Complex) and _is_last(args[1], first):
                return (seen.re, seen.im)[args[2]]
        if node.target is aten.view_as_complex.default and _sets_part(first):
            # So the gradient of a part comes up, with zeros for the other.
            base, part, _, index = first.args
            other = self.graph.call_function(aten.select.int, (self.values[base], -1, 1 - index))
            with self._mode:
                other.meta["val"] = aten.select.int(base.meta["val"], -1, 1 - index)
            pair = self.values[part], other
            return Complex(*(pair if index == 0 else pair[::-1]))
        return super().of(node)

    def form(self, node: fx.Node) -> Callable[..., Any] | None:
        """What computes the same in parts; None for what has no complex numbers in it."""
        if node.op != "call_function" or node.target in _SIZES or not has_complex(node):
            return None
        found = self._forms.get(_named(node))
        if found is None and getattr(node.target, "namespace", "aten") != "aten":
            return as_it_is(node.target)  # a fused op, or the user's own, with a form of its own
        if found is None:
            raise ExportFailed(f"there is no form of {node.target} of complex numbers")
        return found


def has_complex(node: fx.Node) -> bool:
    """Whether a node takes complex numbers, or gives such."""
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    values = [n.meta.get("val") for n in (node, *leaves) if isinstance(n, fx.Node)]
    return any(is_complex(value) for value in (*pytree.tree_leaves(values), *leaves))


def _named(node: fx.Node) -> Any:
    """The operator of a node, or that of the view of which it makes a copy, as in regions."""
    return view_of(node) or node.target


def _is_last(dim: int, of: fx.Node) -> bool:
    return dim in (-1, of.meta["val"].dim() - 1)


def _sets_part(node: fx.Node) -> bool:
    args: Any = node.args
    return node.target is aten.select_scatter.default and _is_last(args[2], node)
