"""What folder layouts share: their JSON, and files inside them by name."""

import json
from collections import Counter
from pathlib import Path, PurePosixPath
from typing import Any

from fuseport.exporter.checkpoint.content import show
from fuseport.exporter.checkpoint.sniff import require_regular
from fuseport.exporter.errors import CorruptInput, UnsafeInput

__all__ = ["inside", "no_repeats", "read_json"]

_JSON_LIMIT = 64 * 2**20  # an index of 500,000 tensors is about that large


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        UsageError: there is no such file.
        CorruptInput: it is too large, no JSON, or no object.
    """
    require_regular(path)
    if path.stat().st_size > _JSON_LIMIT:
        raise CorruptInput(f"{show(path)}: over {_JSON_LIMIT} bytes; no config is that large")
    try:
        value = json.loads(path.read_bytes(), object_pairs_hook=no_repeats)
    except (ValueError, RecursionError) as error:
        raise CorruptInput(
            f"{show(path)}: no valid JSON ({show(error, 100)}); fetch the file again"
        ) from error
    if not isinstance(value, dict):
        raise CorruptInput(f"{show(path)}: not a JSON object; fetch the file again")
    return value


def no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object's pairs as a dictionary; an `object_pairs_hook`.

    Raises:
        ValueError: a key occurs twice, of which Python would take the last.
    """
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"key {twice!r} occurs twice")
    return result


def inside(folder: Path, source: Path, name: object) -> Path:
    """The file `name`, which the file `source` refers to, directly inside `folder`.

    Symlinks are followed: a Hugging Face cache is made of them.

    Raises:
        UnsafeInput: the name leads out of the folder.
        CorruptInput: it is no name, or there is no such file.
    """
    if not isinstance(name, str) or not name or "\0" in name:
        raise CorruptInput(f"{show(source)}: {show(name)}: not a file name; fetch the file again")
    if PurePosixPath(name).name != name or name == ".." or "\\" in name or ":" in name:
        raise UnsafeInput(
            f"{show(source)}: {show(name)}: it names a file outside the folder, which is not"
            " opened; fetch the checkpoint from a source you trust"
        )
    if not (folder / name).is_file():
        raise CorruptInput(f"{show(source)}: {show(name)}: not in the folder; fetch it too")
    return folder / name
