"""Whether a bundle of an earlier run is what an export would write now.

It is if nothing that an export reads has changed: the checkpoint, the options, the versions of
packages and the machine, and fuseport's own sources. Of a user's own code that cannot be known,
since it may import and read anything; then every run exports.
"""

import hashlib
import json
import os
import platform
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fuseport.exporter.bundle import Bundle, hash_file, open_bundle
from fuseport.exporter.bundle.staging import write_whole
from fuseport.exporter.ci.config import Checkpoint
from fuseport.exporter.describe import own_sources, versions
from fuseport.exporter.errors import CorruptInput, Missing, UsageError
from fuseport.ops import build
from fuseport.ops.build import cache_folder

__all__ = ["key", "place", "record", "recorded"]

_OF_VERIFY = ("name", "bundle", "runtimes", "strict", "seeds", "limits", "tolerances", "expected")


def key(checkpoint: Checkpoint) -> str | None:
    """A hash of all that the export of a checkpoint depends on; None where that cannot be known."""
    if checkpoint.model is not None or checkpoint.ops is not None:
        return None
    options = {k: v for k, v in asdict(checkpoint).items() if k not in _OF_VERIFY}
    files = [_tree(Path(checkpoint.path))]
    if checkpoint.adapter is not None:
        files.append(_tree(Path(checkpoint.adapter)))
    if checkpoint.inputs is not None:
        files.append(hash_file(Path(checkpoint.inputs)))
    content: dict[str, Any] = {
        "options": options,
        "files": files,
        "versions": versions(),
        "machine": [
            *platform.uname()[:1],
            platform.machine(),
            *platform.libc_ver(),
            os.cpu_count(),
        ],
        "compiler": _compiler(),
        "fuseport": own_sources(),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def place(checkpoint: Checkpoint, config: Path) -> Path:
    """The folder of a checkpoint's bundle: the file's choice, or one in the cache folder."""
    if checkpoint.bundle is not None:
        return Path(checkpoint.bundle)
    of_config = hashlib.sha256(str(config.resolve()).encode()).hexdigest()[:12]
    return cache_folder() / "ci" / of_config / str(checkpoint.name)


def recorded(folder: Path, wanted: str | None) -> Bundle | None:
    """The bundle there if it was exported under that key and is whole; None if not."""
    if wanted is None:
        return None
    try:
        content = json.loads(_record(folder).read_text(encoding="utf-8"))
        bundle = open_bundle(folder)
    except (OSError, ValueError, CorruptInput, Missing, UsageError):
        return None  # it is exported again, which says what is wrong with the place, if anything
    known = {"key": wanted, "manifest_sha256": bundle.sha256}
    return bundle if content == known else None


def record(bundle: Bundle, made_by: str | None) -> None:
    """Note under which key a bundle was exported.

    Raises:
        OSError, StorageError: the cache folder cannot be written to.
    """
    file = _record(bundle.folder)
    if made_by is None:
        file.unlink(missing_ok=True)
        return
    content = {"key": made_by, "manifest_sha256": bundle.sha256}
    write_whole(file, f"{json.dumps(content)}\n".encode())


def _record(folder: Path) -> Path:
    digest = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()
    return cache_folder() / "ci" / "records" / f"{digest[:24]}.json"


def _compiler() -> str | None:
    """Which compiles the libraries of ops that a bundle has; None for none."""
    try:
        return build.compiler_version(shlex.join(build.compiler_command()))
    except build.BuildError:
        return None


def _tree(path: Path) -> str:
    """A hash of a file, or of all files in a folder."""
    if path.is_file():
        return hash_file(path)
    whole = hashlib.sha256()
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        whole.update(f"{file.relative_to(path).as_posix()}\0{hash_file(file)}\n".encode())
    return whole.hexdigest()
