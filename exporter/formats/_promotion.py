"""Where torch.onnx casts arguments to one dtype, without computing what the program says already.

It asks for the dtypes of what each operator is given, and computes the whole program again, of
fakes, to know them. A program has them with its nodes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import fx
from torch.onnx._internal.fx.passes import type_promotion

__all__ = ["promoted_by_known_values"]

_VALUE = "val"


@contextmanager
def promoted_by_known_values() -> Iterator[None]:
    """Within, torch.onnx computes only the nodes that it adds or changes."""
    with mock.patch.object(type_promotion, "_TypePromotionInterpreter", _Promoting):
        yield


class _Known(fx.Interpreter):
    """Takes the values that nodes have; computes those of others."""

    def run_node(self, n: fx.Node) -> Any:
        """The value of one node."""
        return n.meta[_VALUE] if _VALUE in n.meta else super().run_node(n)


class _Promoting(type_promotion._TypePromotionInterpreter, _Known):
    def _run_node_and_set_meta(self, node: fx.Node) -> Any:
        node.meta.pop(_VALUE, None)  # that from before it was changed
        return super()._run_node_and_set_meta(node)
