"""Where torch.onnx casts arguments to one dtype, without computing what the program says already.

It asks for the dtypes of what each operator is given, and computes the whole program again, of
fakes, to know them. A program has them with its nodes.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

from torch import fx
from torch.onnx._internal.fx.passes import type_promotion

__all__ = ["promoted_by_known_values"]

_VALUE = "val"


@contextmanager
def promoted_by_known_values() -> Iterator[None]:
    """Within, torch.onnx computes only the nodes that it adds or changes."""
    with (
        mock.patch.object(type_promotion, "_TypePromotionInterpreter", _Promoting),
        _overloads(),
    ):
        yield


class _Known(fx.Interpreter):
    """Takes the values that nodes have; computes those of others."""

    def run_node(self, n: fx.Node) -> Any:
        """The value of one node."""
        return n.meta[_VALUE] if _VALUE in n.meta else super().run_node(n)


_TRACED = "_OpTraceDispatchMode"  # of torch 2.11, by which it finds the overload for arguments


def _overloads() -> AbstractContextManager[Any]:
    traced: Any = getattr(type_promotion, _TRACED, None)
    if traced is None:
        return nullcontext()

    class Traced(traced):  # type: ignore[misc]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func.namespace == "prim":  # it asks for a tensor's device
                return func(*args, **(kwargs or {}))
            return super().__torch_dispatch__(func, types, args, kwargs or {})

    return mock.patch.object(type_promotion, _TRACED, Traced)


class _Promoting(type_promotion._TypePromotionInterpreter, _Known):
    def _run_node_and_set_meta(self, node: fx.Node) -> Any:
        node.meta.pop(_VALUE, None)  # that from before it was changed
        return super()._run_node_and_set_meta(node)
