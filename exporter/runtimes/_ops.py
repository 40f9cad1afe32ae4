"""The operators that an artifact needs, registered before it is loaded."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from fuseport import ops
from fuseport.exporter.runtimes import Unsupported

__all__ = ["prepare", "register"]


def prepare(program: Mapping[str, Any]) -> None:
    """Have the libraries of a program's operators compiled; see `runtimes.Runtime`."""
    with suppress(Unsupported):
        register(program)


def register(program: Mapping[str, Any]) -> None:
    """Register what the manifest says is in a program.

    Raises:
        Unsupported: an operator comes from ops of the user's own, which were not given.
    """
    names = program.get("ops", ())
    try:
        if names:  # none would stand for all there are
            ops.register(*names)
    except KeyError as error:
        known = {*ops.OPS, *(o.qualified_name for spec in ops.OPS.values() for o in spec.operators)}
        name = next(name for name in names if name not in known)
        raise Unsupported(
            f"{name} is an operator of the user's own: give its file with --ops"
        ) from error
