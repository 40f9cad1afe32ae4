"""Which ops a command is about, registered ones or a user's own, and their libraries."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from fuseport.exporter import user_code
from fuseport.exporter.errors import Missing, UsageError
from fuseport.ops import OPS, build, ort
from fuseport.ops.spec import OpSpec

__all__ = ["built", "chosen"]


def chosen(names: Iterable[str], place: str | None) -> list[OpSpec]:
    """The ops of these names; all for none.

    Args:
        names: of ops.
        place: a user's module, file or folder that defines `SPEC`, or several as `SPECS`; its ops
            are meant then. None for the registered ones.

    Raises:
        UsageError: an op is unknown, or the file defines none, or one whose name is taken.
        Missing: importing it fails.
    """
    known = OPS if place is None else _defined(place)
    wanted = list(names) or list(known)
    for name in wanted:
        if name not in known:
            raise UsageError(f"{name} is not an op; there are: {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(wanted)]


def built(specs: Sequence[OpSpec], progress: Callable[[str], None]) -> Iterator[str]:
    """Compile the ops' libraries, for torch and, where its headers are here, for ONNX Runtime.

    Args:
        specs: of the ops; those without native sources have no library.
        progress: told of each step.

    Yields:
        A line for each library: where it is, and how many seconds that took.

    Raises:
        Missing: a library for torch cannot be compiled.
    """
    for spec in specs:
        if not spec.has("torch.cpp"):
            yield f"{spec.name}: plain torch, nothing to compile"
            continue
        progress(f"{spec.name}: compiling")
        begin = time.monotonic()
        try:
            path = build.library_path(spec)
        except build.BuildError as error:
            raise Missing(f"{spec.name}: {error}") from error
        yield f"{spec.name}: {path} ({time.monotonic() - begin:.1f} s)"
    every = {**OPS, **{spec.name: spec for spec in specs}}.values()
    progress("ONNX Runtime's library: compiling")
    begin = time.monotonic()
    try:
        yield f"onnxruntime: {ort.library(every)} ({time.monotonic() - begin:.1f} s)"
    except build.BuildError as error:
        yield f"onnxruntime: none: {error}"


def _defined(place: str) -> dict[str, OpSpec]:
    said = f"--ops {place}"
    module = user_code.imported(said, place)
    found: Any = getattr(module, "SPECS", None)
    if found is None:
        found = [module.SPEC] if hasattr(module, "SPEC") else []
    specs: Sequence[Any] = list(found)
    if not specs or not all(isinstance(spec, OpSpec) for spec in specs):
        raise UsageError(f"{said}: it defines no SPEC, nor SPECS, of fuseport.ops.spec.OpSpec")
    taken = {operator.name for spec in OPS.values() for operator in spec.operators}
    for spec in specs:
        for operator in spec.operators:
            if operator.name in taken:
                raise UsageError(f"{said}: there is an operator {operator.name} already")
            taken.add(operator.name)
    return {spec.name: spec for spec in specs}
