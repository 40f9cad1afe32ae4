"""The folder that an export writes: weights, artifacts, samples, and a manifest of their hashes.

A bundle appears whole or not at all: it is staged in a sibling folder, which one rename swaps in.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fuseport.exporter.bundle.staging import replaced
from fuseport.exporter.errors import CorruptInput, Missing, StorageError, UsageError

__all__ = [
    "MANIFEST",
    "SCHEMA",
    "WEIGHTS",
    "Bundle",
    "check_target",
    "differences",
    "hash_file",
    "open_bundle",
    "read_manifest",
    "staged",
]

MANIFEST = "manifest.json"
WEIGHTS = "weights.safetensors"
SCHEMA = "fuseport.bundle/1"

_SELF = "self_sha256"

_ABSENT = "is missing from the bundle"
_ADDED = "is not part of the bundle"
_CHANGED = "changed since the export"
_ADVICE = {
    _ABSENT: "export again",
    _ADDED: "take it out, or export again",
    _CHANGED: "to verify a changed copy, keep it outside the bundle and give it by --artifact",
}


@dataclass(frozen=True)
class Bundle:
    """A bundle on disk whose files are what its manifest says.

    Attributes:
        folder: where it is.
        manifest: its content, see `docs` in README.
        sha256: of the manifest file.
    """

    folder: Path
    manifest: Mapping[str, Any] = field(repr=False)
    sha256: str

    @property
    def weights(self) -> Path:
        """The file of weights."""
        return self.folder / WEIGHTS

    @property
    def tensors(self) -> frozenset[str]:
        """The names of everything that its programs give: outputs, and `grad/…`."""
        programs = self.manifest["programs"].values()
        given = {spec["name"] for program in programs for spec in program["outputs"]}
        return frozenset(given.union(*(program["none"] for program in programs)))


def open_bundle(folder: Path) -> Bundle:
    """Open a bundle and check every file of it against the manifest.

    Raises:
        UsageError: there is no folder.
        CorruptInput: it is no bundle, or a file is missing, was added, or has changed.
        Missing: another version of fuseport wrote it.
    """
    manifest, sha256 = read_manifest(folder)
    for name, state in differences(folder, manifest["files"]):
        raise CorruptInput(f"{folder / name}: {state}; {_ADVICE[state]}")
    return Bundle(folder, manifest, sha256)


def read_manifest(folder: Path) -> tuple[dict[str, Any], str]:
    """The manifest of a bundle, checked by its own hash, and the SHA-256 of its file.

    Raises:
        UsageError, CorruptInput, Missing, StorageError: as `open_bundle`, of the manifest alone.
    """
    if folder.is_file():
        raise UsageError(
            f"{folder}: a file, where the folder of a bundle is wanted; to compare a file with the "
            f"model of a bundle: fuseport verify BUNDLE --artifact {folder}"
        )
    if not folder.is_dir():
        raise UsageError(f"{folder}: there is no such folder; give a bundle that export wrote")
    path = folder / MANIFEST
    try:
        content = path.read_bytes()
        manifest = json.loads(content)
    except FileNotFoundError as error:
        raise CorruptInput(
            f"{folder}: no bundle: {MANIFEST} is missing; give what export wrote, or export again"
        ) from error
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
    return manifest, hashlib.sha256(content).hexdigest()


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
    with replaced(target, lambda: check_target(target, force=force)) as folder:
        manifest: dict[str, Any] = {"schema": SCHEMA}
        yield folder, manifest
        manifest["files"] = _inventory(folder)
        manifest[_SELF] = _digest(manifest)
        text = json.dumps(manifest, indent=1, ensure_ascii=False) + "\n"
        # A config may have halves of characters, which JSON writes as escapes.
        (folder / MANIFEST).write_bytes(text.encode("utf-8", "backslashreplace"))


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


def differences(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Each file that is not as the manifest's `files` say, by name, and what is wrong with it."""
    present = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_symlink() or not path.is_dir()
    }
    present.discard(MANIFEST)
    for name in sorted(present | set(files)):
        path = folder / name
        if name not in present:
            yield name, _ABSENT
        elif name not in files:
            yield name, _ADDED
        # Only a regular file is read: a pipe would never end.
        elif not path.is_file() or path.is_symlink() or hash_file(path) != files[name]["sha256"]:
            yield name, _CHANGED


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
