"""What a file or folder is, without running anything of it: a checkpoint, a bundle or an artifact.

Parsers of artifacts, and models that are built to see which ops they need, run in a child process
with limits (`_worker`); checkpoints are read as an export reads them.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuseport.exporter.bundle import MANIFEST, hash_file, read_manifest
from fuseport.exporter.bundle.trust import is_trusted
from fuseport.exporter.checkpoint import zip_file
from fuseport.exporter.checkpoint.content import show
from fuseport.exporter.checkpoint.sniff import require_regular
from fuseport.exporter.errors import CorruptInput, FuseportError, StorageError, UsageError
from fuseport.exporter.inspect import bundle, checkpoint, text
from fuseport.exporter.inspect.isolated import ask

__all__ = ["SCHEMA", "Inspection", "inspect"]

SCHEMA = "fuseport.inspection/1"

_ONNX = b"\x08"  # a ModelProto's first field, ir_version; no pickle and no zip begins so
_LINKED = ("archive_format", "serialized_exported_program.json")


@dataclass(frozen=True)
class Inspection:
    """What was found.

    Attributes:
        path: what was given.
        kind: `checkpoint`, `bundle` or `artifact`.
        found: as JSON data, by kind.
    """

    path: str
    kind: str
    found: Mapping[str, Any]

    def exit_code(self) -> int:
        """4 where a bundle's files are not as its manifest says, else 0."""
        return 4 if self.kind == "bundle" and self.found["differences"] else 0

    def to_json(self) -> str:
        """The whole as JSON, `fuseport.inspection/1`."""
        content = {"schema": SCHEMA, "path": self.path, "kind": self.kind, **self.found}
        # ASCII: names in a file are the file's, and may be made to write on a terminal.
        return json.dumps(_finite(content), indent=1, allow_nan=False)

    def lines(self) -> list[str]:
        """The whole for a terminal."""
        writer = {"checkpoint": text.checkpoint, "bundle": text.bundle, "artifact": text.artifact}
        return [f"{show(self.path)}: {self.found['what']}", *writer[self.kind](self.found)]


def inspect(path: str | Path, *, weights: str | None = None, tensors: bool = False) -> Inspection:
    """Say what is at a path.

    Args:
        path: of a checkpoint (file or folder), a bundle, or an artifact.
        weights: of a checkpoint, which of several sets; None for the usual one.
        tensors: list every tensor of a checkpoint.

    Raises:
        UsageError: nothing is there, or there are no weights of that name.
        UnsafeInput: a checkpoint's pickle names code; an archive has members that lead outside.
        CorruptInput: it is damaged, or nothing that is known here.
        RuntimeCrash: reading an artifact took too much time or memory.
        StorageError: the file system refuses to read it.
    """
    place = Path(path)
    try:
        if place.is_dir() and (place / MANIFEST).exists():
            return Inspection(str(path), "bundle", bundle.found(place))
        form = None if place.is_dir() else _artifact(place)
    except OSError as error:
        raise StorageError(f"{show(place)}: it cannot be read ({show(error)})") from error
    if form is None:
        return Inspection(str(path), "checkpoint", checkpoint.found(place, weights, tensors))
    if weights is not None:
        raise UsageError(f"{show(place)}: --weights is for checkpoints; this is an artifact")
    found = {"format": form, "bytes": place.stat().st_size, **ask(form, path=str(place.absolute()))}
    if form == "aot_inductor":
        found["trusted"] = _trusted(place)
    return Inspection(str(path), "artifact", found)


def _artifact(path: Path) -> str | None:
    """The format of an artifact, by its content; None for what may be a checkpoint."""
    require_regular(path)
    with path.open("rb") as file:
        head = file.read(4)
    if head[:1] == _ONNX:
        return "onnx"
    if head != b"PK\x03\x04":
        return None
    try:
        with zip_file.opened(path) as archive:
            names = archive.namelist()
    except CorruptInput:
        return None  # damaged: the reader of checkpoints says how
    inner = {name.partition("/")[2] for name in names}
    if any("data/aotinductor/" in name for name in names):
        return "aot_inductor"
    if any(name in inner or name in names for name in _LINKED):
        return "exported_program"
    if "constants.pkl" in inner or any(name.startswith("code/") for name in inner):
        return "torchscript"
    return None


def _trusted(file: Path) -> bool:
    """Whether the user trusts the file, or the bundle that it is in as it was written."""
    sha256 = hash_file(file)
    if is_trusted(sha256):
        return True
    try:
        manifest, of_manifest = read_manifest(file.parent)
    except FuseportError:
        return False  # it is in no bundle
    listed = manifest["files"].get(file.name, {}).get("sha256")
    return listed == sha256 and is_trusted(of_manifest)


def _finite(value: Any) -> Any:
    """JSON has no infinities: training scripts begin their best score with one."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
