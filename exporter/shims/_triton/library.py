"""Operators that are made of Triton kernels, `torch.library.triton_op`: functions, which captures
look into.

They are in no namespace of `torch.ops`: what the decorator returns is what code calls.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import Function

from fuseport.exporter.shims._cuda import replaced

__all__ = ["inlined"]


@contextmanager
def inlined() -> Iterator[None]:
    """For the time of the context, `triton_op` and `wrap_triton` of torch make no operators."""
    with replaced(torch.library, triton_op=_triton_op, wrap_triton=lambda kernel: kernel):
        yield


def _triton_op(
    name: str,
    fn: Callable[..., Any] | None = None,
    /,
    *,
    mutates_args: str | Sequence[str] = (),
    schema: str | None = None,
) -> Any:
    """Takes what torch's takes."""
    return Operator if fn is None else Operator(fn)


class Operator:
    """A function with the backward that is registered for it.

    Args:
        fn: what it computes.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        functools.update_wrapper(self, fn)
        self._fn = fn
        self._apply: Callable[..., Any] = fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(self._fn).bind(*args, **kwargs)
        bound.apply_defaults()
        return self._apply(*bound.args)

    def register_autograd(
        self, backward: Callable[..., Any], /, *, setup_context: Callable[..., Any] | None = None
    ) -> None:
        """Its own backward, as of an autograd function."""

        def prepare(ctx: Any, inputs: Any, output: Any) -> None:
            if setup_context is not None:
                setup_context(ctx, inputs, output)

        names = {
            "forward": staticmethod(self._fn),
            "setup_context": staticmethod(prepare),
            "backward": staticmethod(backward),
            "__module__": self._fn.__module__,
        }
        function: Any = type(self._fn.__name__, (Function,), names)
        self._apply = lambda *args: function.apply(*args)  # which is another one where inlined

    def register_kernel(self, *devices: Any) -> Callable[[Any], Any]:
        """Leaves a form for other devices alone: the function is computed on all."""
        return lambda fn: fn

    def register_fake(self, fn: Any, /) -> Any:
        """Leaves a form without values alone: the function has one."""
        return fn

    register_vmap = register_torch_dispatch = register_fake
