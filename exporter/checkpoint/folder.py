"""What folder layouts share: their JSON, and files inside them by name."""

import errno
import json
from collections import Counter
from pathlib import Path, PurePosixPath
from typing import Any

from fuseport.exporter.checkpoint.content import show
from fuseport.exporter.checkpoint.sniff import require_regular
from fuseport.exporter.errors import CorruptInput, UnsafeInput

__all__ = ["inside", "parsed", "read_json"]

_JSON_LIMIT = 64 * 2**20  # an index of 500,000 tensors is about that large
_VALUES = 2_000_000
_LONG_TEXT = 2**24


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
        value = parsed(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CorruptInput(
            f"{show(path)}: no valid JSON ({show(error, 100)}); fetch the file again"
        ) from error
    if not isinstance(value, dict):
        raise CorruptInput(f"{show(path)}: not a JSON object; fetch the file again")
    return value


def parsed(text: bytes) -> Any:
    """The value of a JSON text, which does not take many times its size in memory.

    Raises:
        ValueError: it is none, a key occurs twice, it has over 2 million values, or is a long text
            that is not ASCII.
        RecursionError: it nests too deep.
    """
    if sum(text.count(sign) for sign in b"[{,") > _VALUES:
        raise ValueError(f"over {_VALUES} values")
    if len(text) > _LONG_TEXT and not text.isascii():  # one character can make all take 4 bytes
        raise ValueError(f"over {_LONG_TEXT} bytes that are not all ASCII")
    return json.loads(text, object_pairs_hook=_no_repeats)


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object's pairs as a dictionary. Of a key that occurs twice Python takes the last."""
    result = dict(pairs)
    if len(result) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"key {twice!r} occurs twice")
    return result


def inside(folder: Path, source: Path, name: str) -> Path:
    """The file `name`, which the file `source` refers to, directly inside `folder`.

    Symlinks are followed: a Hugging Face cache is made of them.

    Raises:
        UnsafeInput: the name leads out of the folder.
        CorruptInput: it is no name, or there is no such file.
    """
    if not name or "\0" in name or not name.isprintable():
        raise CorruptInput(f"{show(source)}: {show(name)}: not a file name; fetch the file again")
    if PurePosixPath(name).name != name or name == ".." or "\\" in name or ":" in name:
        raise UnsafeInput(
            f"{show(source)}: {show(name)}: it names a file outside the folder, which is not"
            " opened; fetch the checkpoint from a source you trust"
        )
    try:
        there = (folder / name).is_file()
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        there = False
    if not there:
        raise CorruptInput(f"{show(source)}: {show(name)}: not in the folder; fetch it too")
    return folder / name
