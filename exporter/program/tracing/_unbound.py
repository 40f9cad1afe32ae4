"""Sizes that hang on values, in a trace that nothing of is kept."""

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._higher_order_ops import utils
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv

__all__ = ["forget_beyond", "unbound_sizes"]

_TRACE = "_maybe_reenter_make_fx"


_LARGEST = 2**63 - 1


def forget_beyond(graph: fx.Graph) -> None:
    """Erase what torch asserts of such sizes where it is so of all: bounds that no size can reach.

    Of how many of `8 * n` are selected, it says that they are no more than 8 times the largest size
    there is, a number that ONNX has no integer for.
    """
    for node in graph.find_nodes(
        op="call_function", target=torch.ops.aten._assert_scalar.default, sort=False
    ):
        held = node.args[0]
        if (
            isinstance(held, fx.Node)
            and held.target is operator.le
            and isinstance(held.args[1], int)
            and held.args[1] > _LARGEST
        ):
            graph.erase_node(node)
            if not held.users:
                graph.erase_node(held)


@contextmanager
def unbound_sizes(env: ShapeEnv) -> Iterator[None]:
    """Within, graphs inside programs may take tensors of such sizes, and none are left to the next.

    Torch runs a program for its types alone, too. What it draws for sizes then waits for a graph
    that it belongs to, and the next that is traced, as one inside a `cond` or of another program of
    the capture, is not that: it would miss them among its results.

    Args:
        env: of the program's sizes.
    """
    trace: Callable[..., Any] | None = getattr(utils, _TRACE, None)  # private: another may lack it

    def traced(*given: Any, **named: Any) -> Callable[..., Any]:
        assert trace is not None
        run = trace(*given, **named)

        def within(*arguments: Any) -> Any:
            if proxy_tensor._CURRENT_MAKE_FX_TRACER is None:
                env.pending_fresh_unbacked_symbols.clear()
            return run(*arguments)

        return within

    with mock.patch.object(utils, _TRACE, traced) if trace else nullcontext():
        yield
    env.pending_fresh_unbacked_symbols.clear()
