"""Autograd functions of model code's own: with their own backward, or inlined.

Export inlines the forward of a `torch.autograd.Function` and differentiates that: its backward is
in no artifact. So truth is computed the same way, and the model's own backward is held against it.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint

from fuseport.exporter.program import one_line

__all__ = ["in_place", "inlined", "saving_copies", "seen", "watched", "without_reentry"]

_INLINE: ContextVar[bool] = ContextVar("inline", default=False)
_SEEN: ContextVar[dict[str, None] | None] = ContextVar("seen", default=None)

# A method of Python's, or from torch 2.15 on one of C: `__get__` binds either to a class.
_apply = Function.__dict__["apply"]


@contextmanager
def watched() -> Iterator[None]:
    """For the time of an import: code that keeps `apply` of a function of its own keeps ours.

    Code often has `scan = Scan.apply` at module level, out of reach of `inlined` otherwise.
    """
    with _patched():
        yield


@contextmanager
def inlined() -> Iterator[None]:
    """Autograd differentiates the forward of autograd functions, and never calls their backward."""
    token = _INLINE.set(True)
    try:
        with _patched(), without_reentry():
            yield
    finally:
        _INLINE.reset(token)


@contextmanager
def without_reentry() -> Iterator[None]:
    """Checkpoints of the re-entrant sort, which autograd refuses here, are of the other sort."""

    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        options: Any = {"use_reentrant": False, "preserve_rng_state": preserve_rng_state}
        return checkpoint.checkpoint(function, *args, **options)

    before = checkpoint.CheckpointFunction.__dict__.get("apply")
    checkpoint.CheckpointFunction.apply = staticmethod(apply)  # type: ignore[method-assign]
    try:
        yield
    finally:
        if before is None:
            del checkpoint.CheckpointFunction.apply
        else:
            checkpoint.CheckpointFunction.apply = before  # type: ignore[method-assign]


@contextmanager
def seen() -> Iterator[dict[str, None]]:
    """The names of the autograd functions that are applied meanwhile, in order."""
    found: dict[str, None] = {}
    token = _SEEN.set(found)
    try:
        with _patched():
            yield found
    finally:
        _SEEN.reset(token)


@contextmanager
def _patched() -> Iterator[None]:
    before = Function.__dict__["apply"]
    Function.apply = classmethod(_applied)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        Function.apply = before  # type: ignore[method-assign]


def _applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
    found = _SEEN.get()
    if found is not None and not cls.__module__.startswith("torch."):
        found[cls.__name__] = None
    if not _INLINE.get() or cls.__module__.startswith("torch."):
        return _apply.__get__(None, cls)(*args, **kwargs)

    if cls.setup_context is not Function.setup_context:
        return cls.forward(*args, **kwargs)
    context = _Context(args)
    result = cls.forward(context, *args, **kwargs)
    return _detached(result, context.non_differentiable)


def saving_copies() -> AbstractContextManager[Any]:
    """What autograd saves for a backward is copied: what writes over it later does no harm."""
    return saved_tensors_hooks(Tensor.clone, lambda saved: saved)


def in_place(error: BaseException) -> str | None:
    """What autograd says of a write in place into what a gradient needs; None of other errors."""
    said, _, _ = one_line(error).partition(" Hint:")
    return said if "inplace operation" in said or "in-place operation" in said else None


def _detached(result: Any, which: tuple[Tensor, ...]) -> Any:
    """What a forward returned, without gradients where it marked that."""
    if isinstance(result, tuple | list):
        return tuple(_detached(value, which) for value in result)
    if isinstance(result, Tensor) and any(result is marked for marked in which):
        return result.detach()
    return result


class _Context:
    """What a forward gets as `ctx`, and nothing reads afterwards."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.needs_input_grad = tuple(isinstance(a, Tensor) and a.requires_grad for a in args)
        self.saved_tensors: tuple[Any, ...] = ()
        self.non_differentiable: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        pass

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        self.non_differentiable = tensors

    def mark_dirty(self, *tensors: Tensor) -> None:
        pass

    def set_materialize_grads(self, value: bool) -> None:
        pass
