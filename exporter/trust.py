"""Which machine code may be loaded: what this user exported, or said to trust.

The files of a bundle are held against its manifest, but a hostile bundle brings a manifest of its
own. So hashes of manifests that `export` wrote are kept in the cache folder; nothing but the user
adds to them.
"""

from pathlib import Path

from fuseport.ops.build import cache_folder

__all__ = ["add", "is_trusted"]


def add(sha256: str) -> None:
    """Trust a manifest, and so its bundle, or a single file, from now on.

    Raises:
        OSError: the cache folder cannot be written to.
    """
    if not is_trusted(sha256):
        _record().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _record().open("a", encoding="ascii") as file:
            file.write(f"{sha256}\n")


def is_trusted(sha256: str) -> bool:
    """Whether this is the hash of a manifest or file that the user trusts."""
    try:
        return sha256 in _record().read_text(encoding="ascii").split()
    except OSError:
        return False


def _record() -> Path:
    return cache_folder() / "trusted"
