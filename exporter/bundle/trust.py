"""Which machine code may be loaded: what this user exported, or said to trust.

The files of a bundle are held against its manifest, but a hostile bundle brings a manifest of its
own. So hashes of manifests that `export` wrote are kept in the cache folder; nothing but the user
adds to them.
"""

from pathlib import Path

from filelock import FileLock

from fuseport.exporter.bundle.staging import write_whole
from fuseport.exporter.errors import StorageError
from fuseport.ops.build import cache_folder

__all__ = ["add", "is_trusted"]


def add(sha256: str) -> None:
    """Trust a manifest, and so its bundle, or a single file, from now on.

    Raises:
        StorageError: the cache folder cannot be written to.
    """
    if is_trusted(sha256):
        return
    record = _record()
    try:
        record.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Read and written again, whole: of a line that is cut off the next one would be a part.
        with FileLock(f"{record}.lock"):
            known = record.read_text(encoding="ascii") if record.exists() else ""
            write_whole(record, f"{known}{sha256}\n".encode("ascii"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise StorageError(f"{record}: cannot be written: {reason}") from error


def is_trusted(sha256: str) -> bool:
    """Whether this is the hash of a manifest or file that the user trusts."""
    try:
        return sha256 in _record().read_text(encoding="ascii").split()
    except (OSError, UnicodeDecodeError):
        return False


def _record() -> Path:
    return cache_folder() / "trusted"
