"""Registers operators with torch's dispatcher: the native library, or else the references.

An op is registered once per process, when its library lies in the cache at import, or else on first
use, which compiles the library (about a minute, once per machine). Where that cannot be, the
references in plain torch are registered under the same schemas; they stay until the process ends.
Operators that a user has registered with torch stay as they are, and get what they lack: a fake,
autograd by the operator of their gradients, and the reference on devices without a kernel.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch._library import simple_registry
from torch._library.custom_ops import OPDEFS

from fuseport.ops import build, cuda
from fuseport.ops.spec import NAMESPACE, Operator, OpSpec, as_tuple

__all__ = [
    "Implementation",
    "compile_together",
    "ensure",
    "ensure_if_cached",
    "has_autograd",
    "has_fake",
    "implementation",
    "mismatch",
    "python_only",
]

Implementation = Literal["native", "reference", "user"]
"""What runs an op: a native library, its reference, or what the user's own code registered."""

_log = logging.getLogger(NAMESPACE)
_registered: dict[tuple[str, ...], Implementation] = {}
_python_only: dict[tuple[str, ...], tuple[str, ...]] = {}
_lock = threading.RLock()
# A Library takes its registrations back when it is collected.
_library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")
_libraries: dict[str, Any] = {NAMESPACE: _library}


def implementation(spec: OpSpec) -> Implementation | None:
    """What runs the op in this process; None if it is not registered yet."""
    return _registered.get(_key(spec))


def python_only(spec: OpSpec) -> tuple[str, ...]:
    """What was registered from the spec, in Python, since a library or the user's code had it not.

    That is all of it for an op whose reference runs it, and neither fakes nor other devices, which
    C++ programs do without.
    """
    return _python_only.get(_key(spec), ())


def ensure(spec: OpSpec) -> Implementation:
    """Registers the op unless it is, compiling its library if need be; says what runs it.

    With the environment variable FUSEPORT_NATIVE=0 that is the reference, and for an op without
    native sources. So it is, with one line of warning, where the library cannot be compiled or
    loaded.

    Raises:
        ValueError: an operator is registered already, and otherwise than it is declared.
    """
    if _key(spec) not in _registered:
        _register(spec)
    return _registered[_key(spec)]


def compile_together(specs: Iterable[OpSpec]) -> None:
    """Compiles at once what `ensure` would compile of these ops, one after the other."""
    lacking = [s for s in specs if _key(s) not in _registered and _native_wanted(s)]
    builds = [partial(build.library_path, spec) for spec in lacking]
    with suppress(build.BuildError):
        builds += [partial(cuda.library_path, spec) for spec in lacking if cuda.wanted(spec)]
    build.together(builds)


def ensure_if_cached(spec: OpSpec) -> Implementation | None:
    """Registers the op if that needs no compiler; says what runs it now."""
    if not _native_wanted(spec) or (build.cached(spec) is not None and cuda.settled(spec)):
        return ensure(spec)
    return implementation(spec)


def mismatch(operator: Operator) -> str | None:
    """How an operator is registered otherwise than it is declared; None if it is not."""
    if not _known(operator):
        return None
    found = operator.overload._schema
    if _signature(found) == _signature(torch._C.parse_schema(operator.name + operator.schema)):
        return None
    # In its own words, without the name: that is how a spec writes it.
    registered = str(found).removeprefix(operator.qualified_name)
    return f"{operator.qualified_name} is registered as {registered}, not as {operator.schema}"


def _signature(schema: Any) -> tuple[Any, ...]:
    arguments = [
        (a.name, str(a.type), a.default_value, a.alias_info is not None and a.alias_info.is_write)
        for a in schema.arguments
    ]
    # Results of what torch.library.custom_op registers have no names.
    return arguments, [str(r.type) for r in schema.returns]


def _native_wanted(spec: OpSpec) -> bool:
    if spec.library is not None:
        return True
    return os.environ.get("FUSEPORT_NATIVE", "1") != "0" and spec.has("torch.cpp")


def _register(spec: OpSpec) -> None:
    with _lock:
        if _key(spec) in _registered:
            return
        done: Implementation = "reference"
        if _native_wanted(spec):
            try:
                build.load(spec)
                done = "native"
                _load_cuda(spec)
            except build.BuildError as error:
                _log.warning("fuseport: %s runs in plain torch, slowly: %s", spec.name, error)
        elif any(map(_known, spec.operators)):
            done = "user"
        for operator in spec.operators:
            if reason := mismatch(operator):
                raise ValueError(reason)
        completed = [what for operator in spec.operators for what in _complete(operator, spec)]
        _python_only[_key(spec)] = tuple(completed)
        _registered[_key(spec)] = done


def _load_cuda(spec: OpSpec) -> None:
    """Loads the op's kernels for the GPUs that are here; without them the reference runs there."""
    try:
        if cuda.wanted(spec):
            cuda.load(spec)
    except build.BuildError as error:
        _log.warning("fuseport: %s runs in plain torch on CUDA, slowly: %s", spec.name, error)


def _complete(operator: Operator, spec: OpSpec) -> Iterator[str]:
    """Registers what the operator has not yet: all of it, or what a library or a user left out.

    Yields what of it C++ programs need.
    """
    library, name = _fragment(operator.namespace), operator.qualified_name
    if not _known(operator):
        yield name
        # Under the schema that a native library would have declared.
        library.define(operator.name + operator.schema)
        library.impl(operator.name, _all_given(operator, "reference"), "CompositeExplicitAutograd")
    elif not _has_kernel(name, "CompositeExplicitAutograd", "CompositeImplicitAutograd"):
        library.impl(operator.name, _stand_in(operator), "CompositeExplicitAutograd")
    if not has_fake(name):
        torch.library.register_fake(name, _all_given(operator, "fake"), lib=library)
    if not has_autograd(name):
        if operator.backward is not None:
            yield f"autograd of {name}"
        setup_context, backward = (
            _refusal(operator)
            if operator.backward is None
            else _gradients(operator, spec.operator(operator.backward))
        )
        torch.library.register_autograd(name, backward, setup_context=setup_context, lib=library)


def _stand_in(operator: Operator) -> Callable[..., Any]:
    """The reference, on devices that there is no kernel for."""
    warned: set[str] = set()

    def stand_in(*inputs: Any) -> Tensor | tuple[Tensor, ...]:
        device = next(t.device.type for t in inputs if isinstance(t, Tensor))
        if device not in warned:
            warned.add(device)
            name = operator.qualified_name
            _log.warning("fuseport: %s has no kernel for %s: plain torch runs it", name, device)
        return operator.reference(*operator.bound(inputs, {}))

    return stand_in


def _all_given(operator: Operator, what: Literal["reference", "fake"]) -> Callable[..., Any]:
    """A function of the operator for the dispatcher, which leaves out inputs at their defaults."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*operator.bound(args, kwargs))

    function: Callable[..., Any] = getattr(operator, what)
    return run


def _key(spec: OpSpec) -> tuple[str, ...]:
    return tuple(operator.qualified_name for operator in spec.operators)


def _fragment(namespace: str) -> Any:
    if namespace not in _libraries:
        _libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")
    return _libraries[namespace]


def _known(operator: Operator) -> bool:
    schemas = torch._C._jit_get_schemas_for_operator(operator.qualified_name)
    return any(not schema.overload_name for schema in schemas)


def _has_kernel(name: str, *keys: str) -> bool:
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in keys)


def has_fake(name: str) -> bool:
    """Whether an operator, by qualified name, can be run on shapes alone."""
    if definition := OPDEFS.get(name):
        # What it registers for itself says only that there is none.
        return definition._abstract_fn is not None
    entry = simple_registry.singleton.find(name)
    return entry.fake_impl.kernel is not None or _has_kernel(
        name, "Meta", "CompositeImplicitAutograd"
    )


def has_autograd(name: str) -> bool:
    """Whether an operator, by qualified name, has a derivative, or refuses to have one itself."""
    if definition := OPDEFS.get(name):
        return definition._backward_fn is not None
    return _has_kernel(name, "Autograd", "AutogradCPU", "CompositeImplicitAutograd")


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
