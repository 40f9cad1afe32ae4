"""Registers operators with torch's dispatcher: the native library, or else the references.

An op is registered once per process, when its library lies in the cache at import, or else on first
use, which compiles the library (about a minute, once per machine). Where that cannot be, the
references in plain torch are registered under the same schemas; they stay until the process ends.
"""

import logging
import os
import threading
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from fuseport.ops import build
from fuseport.ops.spec import NAMESPACE, Operator, OpSpec, as_tuple

__all__ = ["Implementation", "ensure", "ensure_if_cached", "implementation"]

Implementation = Literal["native", "reference"]

_log = logging.getLogger(NAMESPACE)
_registered: dict[str, Implementation] = {}
_lock = threading.RLock()
# A Library takes its registrations back when it is collected.
_library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")


def implementation(spec: OpSpec) -> Implementation | None:
    """What runs the op in this process; None if it is not registered yet."""
    return _registered.get(spec.name)


def ensure(spec: OpSpec) -> Implementation:
    """Registers the op unless it is, compiling its library if need be; says what runs it.

    With the environment variable FUSEPORT_NATIVE=0 that is the reference, and for an op without
    native sources. So it is, with one line of warning, where the library cannot be compiled or
    loaded.
    """
    if spec.name not in _registered:
        _register(spec)
    return _registered[spec.name]


def ensure_if_cached(spec: OpSpec) -> Implementation | None:
    """Registers the op if that needs no compiler; says what runs it now."""
    if not _native_wanted(spec) or build.cached(spec) is not None:
        return ensure(spec)
    return implementation(spec)


def _native_wanted(spec: OpSpec) -> bool:
    return os.environ.get("FUSEPORT_NATIVE", "1") != "0" and spec.has("torch.cpp")


def _register(spec: OpSpec) -> None:
    with _lock:
        if spec.name in _registered:
            return
        done: Implementation = "reference"
        if _native_wanted(spec):
            try:
                build.load(spec)
                done = "native"
            except build.BuildError as error:
                _log.warning("fuseport: %s runs in plain torch, slowly: %s", spec.name, error)
        for operator in spec.operators:
            if done == "reference":
                _define(operator, spec)
            else:
                _fill(operator)
            torch.library.register_fake(operator.qualified_name, operator.fake, lib=_library)
        _registered[spec.name] = done


def _fill(operator: Operator) -> None:
    """Lets the reference stand in on devices that the native library has no kernel for."""
    warned: set[str] = set()

    def stand_in(*inputs: Any) -> Tensor | tuple[Tensor, ...]:
        device = next(t.device.type for t in inputs if isinstance(t, Tensor))
        if device not in warned:
            warned.add(device)
            name = operator.qualified_name
            _log.warning("fuseport: %s has no kernel for %s: plain torch runs it", name, device)
        return operator.reference(*inputs)

    _library.impl(operator.name, stand_in, "CompositeExplicitAutograd")


def _define(operator: Operator, spec: OpSpec) -> None:
    """Registers the reference under the schema that the native library would have declared."""
    _library.define(operator.name + operator.schema)
    _library.impl(operator.name, operator.reference, "CompositeExplicitAutograd")
    if operator.backward is None:
        setup_context, backward = _refusal(operator)
    else:
        setup_context, backward = _gradients(operator, spec.operator(operator.backward))
    torch.library.register_autograd(
        operator.qualified_name, backward, setup_context=setup_context, lib=_library
    )


Hooks = tuple[Callable[..., None], Callable[..., Any]]


def _gradients(operator: Operator, gradient: Operator) -> Hooks:
    """Autograd of `operator` by calling `gradient`, wired by name as `ops.spec` states."""
    cotangents = ["d" + name for name in operator.outputs]
    keeps = [name for name in gradient.inputs if name not in cotangents]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        known = dict(zip(operator.inputs, inputs, strict=True))
        known |= dict(zip(operator.outputs, as_tuple(output), strict=True))
        tensors = [name for name in keeps if isinstance(known[name], Tensor)]
        ctx.tensors = tensors
        ctx.plain = {name: known[name] for name in keeps if name not in tensors}
        ctx.save_for_backward(*(known[name] for name in tensors))
        fixed = [known[n] for n in operator.outputs if "d" + n not in gradient.inputs]
        ctx.mark_non_differentiable(*fixed)

    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        known = dict(zip(ctx.tensors, ctx.saved_tensors, strict=True)) | ctx.plain
        known |= dict(zip(cotangents, grads, strict=True))
        results = gradient(*(known[name] for name in gradient.inputs))
        found = dict(zip(gradient.outputs, results, strict=True))
        return tuple(found.get("d" + name) for name in operator.inputs)

    return setup_context, backward


def _refusal(operator: Operator) -> Hooks:
    """Autograd of an operator that computes gradients: it has none, and says so."""

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        del ctx, inputs, output

    def backward(ctx: Any, *grads: Tensor) -> None:
        # As torch itself says it for the native library.
        raise RuntimeError(f"derivative for {operator.qualified_name} is not implemented")

    return setup_context, backward
