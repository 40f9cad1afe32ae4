"""The folder that an export writes: weights, artifacts, samples, and a manifest of their hashes.

A bundle appears whole or not at all: it is staged in a sibling folder, which one rename swaps in.
"""

import ctypes
import errno
import fcntl
import glob
import hashlib
import json
import os
import secrets
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from fuseport.exporter.errors import CorruptInput, Missing, StorageError, UsageError

__all__ = [
    "MANIFEST",
    "SCHEMA",
    "WEIGHTS",
    "Bundle",
    "check_target",
    "hash_file",
    "open_bundle",
    "staged",
]

MANIFEST = "manifest.json"
WEIGHTS = "weights.safetensors"
SCHEMA = "fuseport.bundle/1"

_SELF = "self_sha256"
_STAGING = ".staging-"


@dataclass(frozen=True)
class Bundle:
    """A bundle on disk whose files are what its manifest says.

    Attributes:
        folder: where it is.
        manifest: its content, see `docs` in README.
        sha256: of the manifest file.
    """

    folder: Path
    manifest: Mapping[str, Any]
    sha256: str

    @property
    def weights(self) -> Path:
        """The file of weights."""
        return self.folder / WEIGHTS


def open_bundle(folder: Path) -> Bundle:
    """Open a bundle and check every file of it against the manifest.

    Raises:
        UsageError: there is no folder.
        CorruptInput: it is no bundle, or a file is missing, was added, or has changed.
        Missing: another version of fuseport wrote it.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder}: there is no such folder; give a bundle that export wrote")
    path = folder / MANIFEST
    try:
        content = path.read_bytes()
        manifest = json.loads(content)
    except FileNotFoundError as error:
        raise CorruptInput(f"{folder}: no bundle: {MANIFEST} is missing; export again") from error
    except (ValueError, RecursionError) as error:
        raise CorruptInput(f"{path}: not JSON any more ({error}); export again") from error
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error
    if path.is_symlink():
        raise CorruptInput(f"{path}: a symbolic link, not the manifest itself; export again")
    if not isinstance(manifest, dict) or not isinstance(manifest.get("schema"), str):
        raise CorruptInput(f"{path}: no manifest of a bundle; export again")
    if manifest["schema"] != SCHEMA:
        raise Missing(
            f"{path}: written as {manifest['schema']}, this fuseport reads {SCHEMA}: "
            "use the version that wrote it, or export again"
        )
    if manifest.get(_SELF) != _digest(manifest) or not isinstance(manifest.get("files"), dict):
        raise CorruptInput(f"{path}: changed since the export; export again")
    _check_files(folder, manifest["files"])
    return Bundle(folder, manifest, hashlib.sha256(content).hexdigest())


def check_target(target: Path, *, force: bool) -> None:
    """Refuse what must not be replaced, before any work is done.

    Raises:
        UsageError: the target exists and is no bundle, or is one and `force` is not given.
    """
    if target.is_symlink():
        raise UsageError(f"{target}: a symbolic link; name the folder itself")
    if not target.exists():
        return
    if not target.is_dir():
        raise UsageError(f"{target}: a file is there; choose another folder")
    if any(target.iterdir()):
        if not (target / MANIFEST).is_file():
            raise UsageError(
                f"{target}: holds something other than a bundle; choose another folder"
            )
        if not force:
            raise UsageError(f"{target}: a bundle is there; --force replaces it")


@contextmanager
def staged(target: Path, *, force: bool) -> Iterator[tuple[Path, dict[str, Any]]]:
    """A folder and a manifest to fill; on leaving, they become the bundle at `target`.

    If the body raises, or the process dies, `target` stays as it was; what a dead process left is
    removed by the next call.

    Raises:
        UsageError: as `check_target`.
        StorageError: writing failed: no space, no permission.
    """
    check_target(target, force=force)
    target = target.absolute()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target)
        folder, lock = _new_sibling(target)
    except OSError as error:
        raise StorageError(f"{target}: cannot be written: {error.strerror}") from error
    manifest: dict[str, Any] = {"schema": SCHEMA}
    try:
        yield folder, manifest
        _share(folder)
        manifest["files"] = _inventory(folder)
        manifest[_SELF] = _digest(manifest)
        text = json.dumps(manifest, indent=1, ensure_ascii=False)
        (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")
        _sync(folder)
        check_target(target, force=force)  # again: another export may have been quicker
        _swap_in(folder, target)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise StorageError(f"{target}: cannot be written: {reason}; nothing was changed") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _digest(manifest: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != _SELF}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _inventory(folder: Path) -> dict[str, dict[str, Any]]:
    return {
        path.relative_to(folder).as_posix(): {
            "sha256": hash_file(path),
            "bytes": path.stat().st_size,
        }
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _check_files(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    present = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_symlink() or not path.is_dir()
    }
    present.discard(MANIFEST)
    for name in sorted(present | set(files)):
        path = folder / name
        if name not in present:
            raise CorruptInput(f"{path}: is missing from the bundle; export again")
        if name not in files:
            raise CorruptInput(f"{path}: is not part of the bundle; take it out, or export again")
        # Only a regular file is read: a pipe would never end.
        is_file = path.is_file() and not path.is_symlink()
        if not is_file or hash_file(path) != files[name]["sha256"]:
            raise CorruptInput(
                f"{path}: changed since the export; to verify a changed copy, keep it outside the "
                "bundle and give it by --artifact"
            )


def hash_file(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal.

    Raises:
        StorageError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error


def _sync(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _share(folder: Path) -> None:
    """Give files the mode that new files have here; some writers keep theirs to the user alone."""
    mode = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def _swap_in(folder: Path, target: Path) -> None:
    """Make `folder` the bundle; what was there ends under the name `folder`, to be deleted."""
    try:
        folder.rename(target)  # POSIX lets a folder replace an empty one
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        _exchange(folder, target)
    descriptor = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(one: Path, other: Path) -> None:
    """Swap two paths in one step: RENAME_EXCHANGE of renameat2(2), RENAME_SWAP on macOS."""
    swap = 2  # the flag's value on both systems
    libc = ctypes.CDLL(None, use_errno=True)
    paths = os.fsencode(one), os.fsencode(other)
    at_cwd = -100
    try:
        if sys.platform == "darwin":
            failed = libc.renamex_np(*paths, swap)
        else:
            failed = libc.renameat2(at_cwd, paths[0], at_cwd, paths[1], swap)
    except AttributeError:  # an old C library
        failed = True
        ctypes.set_errno(errno.ENOSYS)
    if failed:
        code = ctypes.get_errno()
        if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise StorageError(
                f"{other}: this file system cannot replace a folder in one step; export to a new "
                "one; nothing was changed"
            )
        raise OSError(code, os.strerror(code), str(other))


def _new_sibling(target: Path) -> tuple[Path, int]:
    """A folder beside `target`, and an open descriptor that locks it while this process lives."""
    while True:
        folder = target.with_name(f".{target.name}{_STAGING}{secrets.token_hex(8)}")
        folder.mkdir()
        descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if folder.exists():
            return folder, descriptor
        os.close(descriptor)  # another export took it for abandoned before it was locked


def _remove_abandoned(target: Path) -> None:
    """Delete what exports to the same target left when they were killed."""
    for folder in target.parent.glob(f"{glob.escape(f'.{target.name}{_STAGING}')}*"):
        with suppress(OSError):  # locked: somebody is at it; or gone by now
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
