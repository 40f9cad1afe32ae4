"""Which ops a command is about, those of fuseport or a user's own, and their libraries."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fuseport.exporter import user_code
from fuseport.exporter.errors import Missing, StorageError, UsageError
from fuseport.exporter.program import one_line
from fuseport.ops import OPS, added, build, cuda, ort, refused
from fuseport.ops.spec import OpSpec

__all__ = ["OwnOps", "built", "chosen", "needed", "own_ops"]


@dataclass(frozen=True)
class OwnOps:
    """A user's ops, and where they come from.

    Attributes:
        place: what `--ops` gave, for a child process to import again.
        name: of the file, folder or module, without the path to it.
        sha256: of its sources.
        specs: that it defines.
    """

    place: str
    name: str
    sha256: str
    specs: tuple[OpSpec, ...]

    def noted(self, used: Iterable[str]) -> dict[str, str] | None:
        """What a manifest says of them if they have one of the operators used; None if not."""
        mine = {operator.qualified_name for spec in self.specs for operator in spec.operators}
        return {"code": self.name, "sha256": self.sha256} if mine & set(used) else None


@contextmanager
def own_ops(place: str | None) -> Iterator[OwnOps | None]:
    """Import a user's ops, and count them among `fuseport.ops.OPS` in the context.

    Args:
        place: as `--ops` gives it; None for no ops of the user's.

    Raises:
        UsageError: there is no such file, or it defines no op, or one that cannot be had.
        Missing: importing it fails.
    """
    if place is None:
        yield None
        return
    specs, file = _defined(place)
    with added(specs):
        yield OwnOps(place, file.name, user_code.digest(file), tuple(specs))


def needed(manifest: Mapping[str, Any], own: OwnOps | None) -> str | None:
    """What a reader of a bundle should know of the user's ops in it; None if there are none.

    Raises:
        Missing: there are, and they were not given.
    """
    noted = manifest.get("own_ops")
    if noted is None:
        return None
    if own is None:
        raise Missing(f"ops in it come from {noted['code']}: give it again with --ops")
    if own.sha256 == noted["sha256"]:
        return None
    return f"{own.name} is not as {noted['code']} was at the export: its ops may differ"


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
    known = OPS if place is None else {spec.name: spec for spec in _defined(place)[0]}
    wanted = list(names) or list(known)
    for name in wanted:
        if name not in known:
            raise UsageError(f"{name} is not an op; there are: {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(wanted)]


def built(specs: Sequence[OpSpec]) -> Iterator[str]:
    """Compile the ops' libraries, for torch and, where its headers are here, for ONNX Runtime.

    For each there is a second one with CUDA kernels where there is a GPU, or one is named; see
    `cuda.architectures`.

    Args:
        specs: of the ops; those without native sources have no library.

    Yields:
        A line for each library: where it is, or why there is none.

    Raises:
        UsageError: GPUs are named in a way that is none.
        Missing: a library for torch cannot be compiled: one for the CPU, or for GPUs that are named
            and not only here.
    """
    try:
        targets, of_cuda = cuda.architectures(), [spec for spec in specs if cuda.wanted(spec)]
    except build.BuildError as error:
        raise UsageError(str(error)) from error
    named = bool(os.environ.get(cuda.ARCHITECTURES))
    with_sources = [spec for spec in specs if spec.has("torch.cpp")]
    build.together(
        [
            *(partial(build.library_path, spec) for spec in with_sources),
            *(partial(cuda.library_path, spec) for spec in of_cuda),
        ]
    )
    for spec in specs:
        if spec.library is None and not spec.has("torch.cpp"):
            yield f"{spec.name}: plain torch, nothing to compile"
            continue
        yield _line(spec.name, partial(build.library_path, spec), wanted=True)
        if spec in of_cuda:
            yield _line(f"{spec.name} on CUDA", partial(cuda.library_path, spec), wanted=named)
    if named and torch.version.cuda is None:
        yield "on CUDA: none for torch, which was built without CUDA"
    every = {**OPS, **{spec.name: spec for spec in specs}}.values()
    yield _line("onnxruntime", partial(ort.library, every), wanted=False)
    if targets:
        yield _line("onnxruntime on CUDA", partial(ort.library, every, "cuda"), wanted=False)


def _line(name: str, library: Callable[[], Path], wanted: bool) -> str:
    try:
        return f"{name}: {library()}"
    except build.BuildError as error:
        if not wanted:
            return f"{name}: none: {error}"
        # Of what the compiler itself could not write, only its complaint tells.
        full = isinstance(error.__cause__, OSError)
        raise (StorageError if full else Missing)(f"{name}: {error}") from error


def _defined(place: str) -> tuple[list[OpSpec], Path]:
    said = f"--ops {place}"
    module = user_code.imported_once(said, place)
    found: Any = getattr(module, "SPECS", None)
    if found is None:
        found = [module.SPEC] if hasattr(module, "SPEC") else []
    specs: list[Any] = list(found)
    if not specs or not all(isinstance(spec, OpSpec) for spec in specs):
        raise UsageError(f"{said}: it defines no SPEC, nor SPECS, of fuseport.ops.spec.OpSpec")
    if reason := next(filter(None, map(_fault, specs)), None) or refused(specs):
        raise UsageError(f"{said}: {reason}")
    file = Path(str(module.__file__))
    return specs, file.parent if file.name == "__init__.py" else file


def _fault(spec: OpSpec) -> str | None:
    """What a spec says that cannot be; None if nothing."""
    names = {operator.name for operator in spec.operators}
    for operator in spec.operators:
        try:
            torch._C.parse_schema(operator.name + operator.schema)
        except RuntimeError as error:
            return f"{operator.qualified_name}: its schema cannot be read: {one_line(error)}"
        if operator.backward is not None and operator.backward not in names:
            return f"{operator.qualified_name}: its backward {operator.backward} is not declared"
    if spec.lowers:
        try:
            spec.lowering().decompositions()
        except Exception as error:  # of onnx's parser, or of the user's own code
            return f"{spec.name}: its form in ONNX: {one_line(error)}"
    return None
