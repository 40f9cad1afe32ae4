"""Sizes that hang on values, in a trace that nothing of is kept."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

from torch._higher_order_ops import utils
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv

__all__ = ["unbound_sizes"]

_TRACE = "_maybe_reenter_make_fx"


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
