"""Autograd functions of model code's own: with their own backward, or inlined.

Export inlines the forward of a `torch.autograd.Function` and differentiates that: its backward is
in no artifact. So truth is computed the same way, and the model's own backward is held against it.
"""

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils import checkpoint
from torch.utils._python_dispatch import _disable_current_modes

from fuseport.exporter.program import one_line
from fuseport.exporter.program.float64 import Float64

__all__ = [
    "doubts",
    "in_place",
    "inlined",
    "saving_copies",
    "seen",
    "watched",
    "without_reentry",
]

_INLINE: ContextVar[bool] = ContextVar("inline", default=False)
Verdict = Literal["right", "wrong", "unseen"]
"""Of a function's own backward: the gradient of its forward or another; or that of a forward that
autograd does not see, as it sees nothing of what is computed in memory of another library's."""

_SEEN: ContextVar[dict[str, Verdict] | None] = ContextVar("seen", default=None)

# A method of Python's, or from torch 2.15 on one of C: `__get__` binds either to a class.
_apply = Function.__dict__["apply"]


def doubts(config: Mapping[str, Any]) -> tuple[str, ...]:
    """A note where functions of a model have another backward than artifacts.

    Args:
        config: of the model's architecture, in which `wrong` names such functions.
    """
    if not (names := config.get("wrong")):
        return ()
    return (
        f"the model's own backward of {', '.join(names)} is not the gradient of its forward, which "
        "artifacts have: they train otherwise than the model does",
    )


@contextmanager
def watched() -> Iterator[None]:
    """For the time of an import, as a constructor may have too: code that keeps `apply` of a
    function of its own keeps ours.

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
        # Stopping its second forward pass early is an exception, which TorchScript's interpreter
        # turns into another one.
        with checkpoint.set_checkpoint_early_stop(False):
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
def seen() -> Iterator[dict[str, Verdict]]:
    """The names of the autograd functions that are applied meanwhile, in order, and what they are
    at their first call; right, where nothing else is known."""
    found: dict[str, Verdict] = {}
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
    own = not cls.__module__.startswith("torch.")
    if found is not None and own and cls.__name__ not in found:
        found[cls.__name__] = "right"
        found[cls.__name__] = _verdict(cls, args, kwargs)
    if not _INLINE.get() or not own:
        return _apply.__get__(None, cls)(*args, **kwargs)
    return _inlined(cls, args, kwargs)


def _inlined(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the forward of an autograd function gives, for autograd to differentiate.

    Autograd bears no writes into one view of several, as a part of `split` is, which without it are
    none of its business. So a forward that writes into such gets a copy: what it returns is what
    its callers go on with, as a rule.
    """
    parts = [i for i, a in enumerate(args) if _is_part(a)]
    if parts and _writes(cls, args, kwargs, parts):
        args = tuple(a.clone() if i in parts else a for i, a in enumerate(args))
    context = _Context(args)
    own_context = cls.setup_context is Function.setup_context
    with _Plainly(), _no_grad_for_nothing():
        result = cls.forward(*([context] if own_context else []), *args, **kwargs)
    return _detached(result, context.non_differentiable)


def _writes(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any], places: Sequence[int]) -> bool:
    """Whether a forward writes into one of the arguments at those places.

    It is run for that on tensors of these sizes, outside of a capture; where that fails, the answer
    is yes.
    """
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        try:
            given = tuple(_any_like(a) for a in args)
            before = [given[i].clone() for i in places]
            context = [_Context(given)] if cls.setup_context is Function.setup_context else []
            cls.forward(*context, *given, **kwargs)
        except Exception:  # of whatever code that is; a copy is right in any case
            return True
    return not all(torch.equal(x, given[i]) for x, i in zip(before, places, strict=True))


def _any_like(value: Any) -> Any:
    """A tensor that is as large, with values of its own."""
    if not isinstance(value, Tensor):
        return value
    shape = [size if isinstance(size, int) else size.node.hint for size in value.shape]
    return torch.rand(shape).to(value.dtype)


def _is_part(value: Any) -> bool:
    """Whether it is one of several views that a function has returned, or a view of one."""
    autograd = torch._C._autograd
    if not isinstance(value, Tensor) or not value._is_view():
        return False
    meta = autograd._get_creation_meta(value)
    return bool(meta == autograd.CreationMeta.MULTI_OUTPUT_NODE)


@contextmanager
def _no_grad_for_nothing() -> Iterator[None]:
    """`torch.no_grad()` changes nothing in model code meanwhile: a forward is run without autograd
    as a rule, and what it says of that says nothing of its backward."""
    enter = torch.no_grad.__enter__

    def entered(context: torch.no_grad) -> None:
        enter(context)
        caller = str(sys._getframe(1).f_globals.get("__name__"))
        if caller.partition(".")[0] != "torch":
            torch.set_grad_enabled(context.prev)

    torch.no_grad.__enter__ = entered  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.no_grad.__enter__ = enter  # type: ignore[method-assign]


class _Plainly(TorchFunctionMode):
    """A forward is run without autograd as a rule: what it does about that says nothing here.

    `x.detach()` and `x.data` are x, as a view: what becomes of that, as `requires_grad_()`, x
    stays. What is handed to another library, which takes none that autograd sees, is detached.
    Views of parts come one by one: autograd bears no writes into those of which there are several.
    What is computed into `out` is computed, and written there, which autograd bears, too.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DETACHING and args:
            return args[0].view_as(args[0])
        if func in _HANDING:
            args = (args[0].detach(), *args[1:])
        if (kwargs or {}).get("out") is not None:
            return _into(kwargs["out"], func, args, kwargs)
        result = func(*args, **(kwargs or {}))
        if func not in _PARTING:
            return result
        whole: Tensor = args[0] if args else kwargs["input" if "input" in kwargs else "tensor"]
        dim = _dimension(func, args, kwargs or {}) % whole.dim()
        if func in (torch.unbind, Tensor.unbind):
            return tuple(whole.select(dim, i) for i in range(len(result)))
        begins = itertools.accumulate((part.shape[dim] for part in result), initial=0)
        return tuple(
            whole.narrow(dim, begin, part.shape[dim])
            for begin, part in zip(begins, result, strict=False)
        )


def _into(out: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a function gives in `out`, where that has the size for it."""
    found = func(*args, **{name: value for name, value in kwargs.items() if name != "out"})
    pairs = list(zip(pytree.tree_leaves(out), pytree.tree_leaves(found), strict=True))
    if any(there.shape != value.shape for there, value in pairs):
        return func(*args, **kwargs)
    for there, value in pairs:
        there.copy_(value)
    return out


_DETACHING = (torch.detach, Tensor.detach, Tensor.data.__get__)  # type: ignore[attr-defined]
_HANDING = (Tensor.numpy, Tensor.__array__, Tensor.__dlpack__)
_PARTING = {
    torch.unbind: 1, Tensor.unbind: 1, torch.chunk: 2, Tensor.chunk: 2, torch.split: 2,
    Tensor.split: 2, torch.tensor_split: 2, Tensor.tensor_split: 2,
}  # fmt: skip
"""Functions that return several views, and the place of the dimension among their arguments."""


def _dimension(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    place = _PARTING[func]
    found: int = args[place] if len(args) > place else kwargs.get("dim", 0)
    return found


def _verdict(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Verdict:
    """What the own backward of a function is.

    Where it differs from autograd's of the forward, that which is the slope of the forward is
    right, along one direction. In float64, also of what the function computes in narrower types,
    whose roundings a slope would be lost in; of a function that takes none, nothing is known.
    """
    draw = torch.Generator().manual_seed(0)
    wide = [
        a.detach().double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args
    ]
    moves = {
        i: torch.randn(a.shape, generator=draw, dtype=torch.float64)
        for i, a in enumerate(wide)
        if isinstance(a, Tensor) and a.is_floating_point()
    }
    seeds: dict[int, Tensor] = {}

    def total(apply: Callable[..., Any], leaves: Mapping[int, Tensor]) -> Tensor:
        # Nothing can be written into leaves themselves.
        given = [
            leaves[i].clone() if i in leaves else a.clone() if isinstance(a, Tensor) else a
            for i, a in enumerate(wide)
        ]
        results = pytree.tree_leaves(apply(*given, **kwargs))
        sums = torch.zeros((), dtype=torch.float64)
        for i, result in enumerate(results):
            if isinstance(result, Tensor) and result.is_floating_point():
                if i not in seeds:
                    seeds[i] = torch.randn(result.shape, generator=draw, dtype=torch.float64)
                sums = sums + (result * seeds[i].to(result.device)).sum().cpu()
        return sums

    def gradients(apply: Callable[..., Any]) -> dict[int, Tensor]:
        leaves = {i: wide[i].clone().requires_grad_() for i in moves}
        with torch.enable_grad():
            sums = total(apply, leaves)
            if not sums.requires_grad:
                return {}
            found = torch.autograd.grad(sums, list(leaves.values()), allow_unused=True)
        return {i: g.cpu() for i, g in zip(leaves, found, strict=True) if g is not None}

    def slope(found: Mapping[int, Tensor]) -> float:
        return sum(float((found[i] * moves[i]).sum()) for i in theirs if i in found)

    def moved(by: float) -> float:
        leaves = {i: wide[i] + by * moves[i].to(wide[i].device) for i in theirs}
        with torch.no_grad():
            return float(total(own, leaves))

    own = _apply.__get__(None, _in_float64(cls))
    token = _SEEN.set(None)
    try:
        with Float64():
            theirs = gradients(own)  # of a part of the arguments, perhaps
            ours = gradients(lambda *given, **named: _inlined(cls, given, named))
            if math.isclose(slope(theirs), slope(ours), rel_tol=1e-6, abs_tol=1e-9):
                return "right"
            right = (moved(_STEP) - moved(-_STEP)) / (2 * _STEP)
    except Exception:  # of model code; whoever needs it will say so
        return "right"
    finally:
        _SEEN.reset(token)
    return "unseen" if abs(slope(theirs) - right) < abs(slope(ours) - right) else "wrong"


_STEP = 1e-5


def _in_float64(cls: Any) -> Any:
    """A function whose backward computes so too, where autograd calls it without modes."""

    def backward(ctx: Any, *gradients: Any) -> Any:
        with Float64():
            return cls.backward(ctx, *gradients)

    known = cls.backward is not Function.backward
    return type(cls.__name__, (cls,), {"backward": staticmethod(backward)}) if known else cls


def saving_copies() -> AbstractContextManager[Any]:
    """What autograd saves for a backward is copied: what writes over it later does no harm."""
    return saved_tensors_hooks(Tensor.clone, lambda saved: saved)


def in_place(error: BaseException | str) -> str | None:
    """What autograd says of a write in place into what a gradient needs; None of other errors.

    Args:
        error: or its text.
    """
    text = error if isinstance(error, str) else one_line(error)
    said, _, _ = text.partition(" Hint:")
    return said if any(words in said for words in _IN_PLACE) else None


_IN_PLACE = ("inplace operation", "in-place operation", "modified inplace")


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
