"""The native libraries of ops that travel in a bundle, so that C++ programs run its artifacts."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fuseport.exporter.bundle import MANIFEST, machine, trust
from fuseport.ops import OPS, build, cuda, registration
from fuseport.ops.spec import OpSpec

__all__ = ["FOLDER", "find", "pack"]

FOLDER = "ops"


def pack(manifest: Mapping[str, Any], folder: Path) -> tuple[list[dict[str, str]], list[str]]:
    """Copy the library of each op that the programs use to `ops/<op>.so` in the bundle.

    Args:
        manifest: of the bundle; its `ops` are the operators in use.
        folder: of the bundle.

    Returns:
        What the manifest says of them under `libraries`, and a note on each that cannot be built.
    """
    entries: list[dict[str, str]] = []
    notes: list[str] = []
    for spec in _used(manifest["ops"]):
        try:
            library = _own(spec)
        except build.BuildError as error:
            notes.append(
                f"no library of {spec.name} is in the bundle, which C++ programs need: {error}"
            )
            continue
        (folder / FOLDER).mkdir(exist_ok=True)
        file = f"{FOLDER}/{spec.name}.so"
        shutil.copyfile(library, folder / file)
        entries.append({"op": spec.name, "file": file, **machine.here()})
    return entries, notes


def find(artifact: Path, operators: Iterable[str] = (), device: str = "cpu") -> list[Path]:
    """The libraries that an artifact needs, to be loaded before it.

    They are the bundle's own, where the user trusts it and it was exported for this system, machine
    and version of torch; else those of this machine, which are built if they are not in the cache.

    Args:
        artifact: the file.
        operators: that are in it, `fuseport::<name>`, for a file outside a bundle; none for all.
        device: `cuda` for those of the CUDA kernels, too, which are always of this machine.

    Raises:
        BuildError: one is needed from this machine, and cannot be built; or an op has no kernels
            for CUDA, and no Python is there to run its reference.
    """
    try:
        content = (artifact.parent / MANIFEST).read_bytes()
        manifest = json.loads(content)
        listed = {entry["file"] for entry in manifest["artifacts"]}
    except (OSError, ValueError, TypeError, KeyError):
        listed = set()
    if artifact.name not in listed:
        native = [spec for spec in OPS.values() if spec.library or spec.has("torch.cpp")]
        used = _used(operators) or native
        return [*(_own(spec) for spec in used), *_for_device(used, device)]
    trusted = trust.is_trusted(hashlib.sha256(content).hexdigest())
    bundled = {
        entry["op"]: artifact.parent / entry["file"]
        for entry in manifest.get("libraries", ())
        if trusted and machine.unlike(entry) is None
    }
    # Libraries of a user's own ops serve without the spec of theirs.
    others = [file for op, file in bundled.items() if op not in OPS]
    used = _used(manifest["ops"], complete=not others)
    own = (bundled.get(spec.name) or _own(spec) for spec in used)
    return [*others, *own, *_for_device(used, device)]


def _used(operators: Iterable[str], *, complete: bool = True) -> list[OpSpec]:
    """The ops that have these operators; BuildError if `complete`, and one is of none."""
    wanted = set(operators)
    found = {n: wanted & {o.qualified_name for o in op.operators} for n, op in OPS.items()}
    unknown = wanted.difference(*found.values())
    if complete and unknown:
        name = min(unknown)
        raise build.BuildError(f"{name} is an operator of the user's own: give its file with --ops")
    return [OPS[name] for name, own in found.items() if own]


def _for_device(used: Iterable[OpSpec], device: str) -> list[Path]:
    """The libraries that have kernels for another device than the CPU."""
    if device == "cpu":
        return []
    ours = [spec for spec in used if spec.library is None]  # a library of the user's has its own
    if lacking := [spec.name for spec in ours if not spec.has("cuda.cpp")]:
        raise build.BuildError(f"there is no CUDA kernel of {', '.join(lacking)}")
    return [cuda.library_path(spec) for spec in ours]


def _own(spec: OpSpec) -> Path:
    if os.environ.get("FUSEPORT_NATIVE") == "0":
        raise build.BuildError("FUSEPORT_NATIVE=0 asks for plain torch")
    if spec.library is not None and (lacks := registration.python_only(spec)):
        raise build.BuildError(f"{spec.library.name} has no {', nor '.join(lacks)}")
    return build.library_path(spec)
