"""Sizes that the gradient of a loop asks for.

What turns save for it, torch stacks, as it can tensors alone. A size is that of every turn, and is
saved once.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import SymInt, fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

__all__ = ["sizes_saved"]

_SORT = "_optimize_forward_intermediates"  # private


@contextmanager
def sizes_saved() -> Iterator[None]:
    """Within, turns of scans whose gradients are traced save sizes beside what they stack."""
    scans: Any = importlib.import_module("torch._higher_order_ops.scan")  # a function has its name
    of: Any = getattr(scans, "ScanAutogradImpl", None)
    sort: Callable[[Any], None] | None = getattr(of, _SORT, None)
    if sort is None:  # of another torch
        yield
        return

    def sorted_out(self: Any) -> None:
        graph: fx.Graph = self.hop_partitioned_graph.fw_gm.graph
        given, spec = self.additional_inputs, self.fw_spec
        taken = _as_given(graph, self.hop_partitioned_graph.n_fw_outputs)
        # Torch saves what turns are given as it is.
        self.additional_inputs = (*given, *(placeholder.meta["val"] for placeholder in taken))
        self.fw_spec = pytree.tree_structure((self.init, self.xs, self.additional_inputs))
        sort(self)
        self.additional_inputs, self.fw_spec = given, spec
        for placeholder in taken:
            graph.erase_node(placeholder)
        self.hop_partitioned_graph.fw_gm.recompile()

    with mock.patch.object(of, _SORT, sorted_out):
        yield


def _as_given(graph: fx.Graph, count: int) -> list[fx.Node]:
    """Have a turn return placeholders for the sizes after so many outputs: those made."""
    output = graph.output_node()
    left: Any = output.args[0]
    last = graph.find_nodes(op="placeholder")[-1]
    made: dict[fx.Node, fx.Node] = {}
    for node in left[count:]:
        size = node.meta.get("val") if isinstance(node, fx.Node) else None
        if not isinstance(size, SymInt) or free_unbacked_symbols(size):
            continue
        if node.op != "placeholder" and node not in made:
            with graph.inserting_after(last):
                last = made[node] = graph.placeholder(f"{node.name}_saved")
            last.meta["val"] = size
    output.args = ((*left[:count], *(made.get(node, node) for node in left[count:])),)
    return [*made.values()]
