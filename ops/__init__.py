"""The fused ops: `OPS`, by name, and their public functions, `fuseport.ops.<op>`.

Every folder here with an `__init__.py` that has a `SPEC` is an op; nothing else lists them. In
type-checked code import a function from its own package, which checkers can follow:
`from fuseport.ops.selective_scan import selective_scan`.
"""

import importlib
import pkgutil

from fuseport.ops import registration
from fuseport.ops.registration import Implementation
from fuseport.ops.spec import OpSpec

__all__ = ["OPS", "register"]


def _find() -> dict[str, OpSpec]:
    folders = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.ispkg)
    specs = [importlib.import_module(f"{__name__}.{folder}").SPEC for folder in folders]
    return {spec.name: spec for spec in specs}


def register() -> dict[str, Implementation]:
    """Registers every op that is not registered yet, compiling what is not compiled yet.

    Call it before a program that uses the ops is traced, loaded or run without going through the
    public functions. Returns what runs each op; see `fuseport.ops.registration.ensure`.
    """
    return {name: registration.ensure(spec) for name, spec in OPS.items()}


OPS: dict[str, OpSpec] = _find()

for _spec in OPS.values():
    globals()[_spec.name] = _spec.function
    registration.ensure_if_cached(_spec)
