"""The fused ops: `OPS`, by name, and their public functions, `fuseport.ops.<op>`.

Every folder here with an `__init__.py` that has a `SPEC` is an op; nothing else lists them. Ops of
a user's own count among `OPS` for as long as they are `added`. Layers
made of several ops are in `fuseport.ops.compositions`. In
type-checked code import a function from its own package, which checkers can follow:
`from fuseport.ops.selective_scan import selective_scan`.
"""

import importlib
import pkgutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fuseport.ops import ort, registration
from fuseport.ops.registration import Implementation
from fuseport.ops.spec import OpSpec

__all__ = ["OPS", "added", "onnxruntime_library", "refused", "register"]


def _find() -> dict[str, OpSpec]:
    folders = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.ispkg)
    modules = [importlib.import_module(f"{__name__}.{folder}") for folder in folders]
    return {module.SPEC.name: module.SPEC for module in modules if hasattr(module, "SPEC")}


def register(*names: str) -> dict[str, Implementation]:
    """Registers ops that are not registered yet, compiling what is not compiled yet.

    Call it before a program that uses the ops is traced, loaded or run without going through the
    public functions, which register their op themselves.

    Args:
        names: of ops, or of operators as the dispatcher knows them, `fuseport::<name>`; none for
            all ops.

    Returns:
        What runs each of these ops; see `fuseport.ops.registration.ensure`.

    Raises:
        KeyError: there is no op of a name.
    """
    specs = _named(names)
    registration.compile_together(specs)
    return {spec.name: registration.ensure(spec) for spec in specs}


def _named(names: Iterable[str]) -> list[OpSpec]:
    """Ops by their names or their operators', each once; all for none."""
    owners = {o.qualified_name: spec.name for spec in OPS.values() for o in spec.operators}
    wanted = dict.fromkeys(owners.get(name, name) for name in names) or OPS
    for name in wanted:
        if name not in OPS:
            raise KeyError(f"{name} is not an op; there are: {', '.join(OPS)}")
    return [OPS[name] for name in wanted]


def refused(specs: Iterable[OpSpec]) -> str | None:
    """Why ops of a user's own cannot be `added`; None if they can."""
    taken = {operator.qualified_name for spec in OPS.values() for operator in spec.operators}
    names = set(OPS)
    for spec in specs:
        if spec.name in names:
            return f"there is an op {spec.name} already: give this one another name"
        names.add(spec.name)
        for operator in spec.operators:
            if operator.qualified_name in taken:
                return f"there is an operator {operator.qualified_name} already"
            taken.add(operator.qualified_name)
            if reason := registration.mismatch(operator):
                return reason
    return None


@contextmanager
def added(specs: Iterable[OpSpec]) -> Iterator[None]:
    """Count ops of the user's own among `OPS`, registered, for the duration of the context.

    All that is made of ops goes by `OPS`. Those that are in it already stay in it. What is
    registered with torch stays registered.

    Raises:
        ValueError: an op or operator has the name of another one, or an operator is registered
            otherwise than it is declared.
    """
    new = [spec for spec in specs if OPS.get(spec.name) is not spec]
    if reason := refused(new):
        raise ValueError(reason)
    for spec in new:
        registration.ensure(spec)
        OPS[spec.name] = spec
    try:
        yield
    finally:
        for spec in new:
            del OPS[spec.name]


def onnxruntime_library(*names: str, device: str = "cpu") -> Path:
    """The library of fused kernels for ONNX Runtime, compiled now if it is not compiled yet.

    Give it to `SessionOptions.register_custom_ops_library`, once: the session then runs nodes of
    the domain `fuseport.ops` by these kernels instead of their function bodies. C++ programs do so
    by `SessionOptions::RegisterCustomOpsLibrary`.

    Args:
        names: of the ops that it is to have, or of their operators, `fuseport::<name>`; none for
            all, which take longer to compile.
        device: `cpu`, or `cuda` for sessions on ONNX Runtime's CUDA provider. A session has the one
            or the other. Some nodes have a kernel in that for the CPU alone.

    Raises:
        KeyError: there is no op of a name.
        fuseport.ops.build.BuildError: it cannot be compiled; the message says what is missing.
    """
    return ort.library(_named(names), device)


OPS: dict[str, OpSpec] = _find()

for _spec in OPS.values():
    globals()[_spec.name] = _spec.function
    registration.ensure_if_cached(_spec)
