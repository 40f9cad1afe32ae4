"""Pickles and archives written by hand: what no pickler would write."""

import warnings
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

__all__ = [
    "archive",
    "call",
    "entries",
    "legacy",
    "listed",
    "number",
    "pickle",
    "rewritten",
    "storage",
    "tensor",
    "text",
    "tupled",
]

MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


def pickle(value: bytes) -> bytes:
    """A whole pickle of protocol 2 that leaves `value`, as the operations that push it."""
    return b"\x80\x02" + value + b"."


def text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + len(data).to_bytes(4, "little") + data


def number(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def tupled(*values: bytes) -> bytes:
    return b"(" + b"".join(values) + b"t"


def listed(*values: bytes) -> bytes:
    return b"](" + b"".join(values) + b"e"


def entries(values: Mapping[str, bytes]) -> bytes:
    return b"}(" + b"".join(text(key) + value for key, value in values.items()) + b"u"


def call(name: str, *arguments: bytes) -> bytes:
    module, _, attribute = name.rpartition(".")
    return f"c{module}\n{attribute}\n".encode() + tupled(*arguments) + b"R"


def storage(numel: int, key: str = "0", kind: str = "FloatStorage", *, old: bool = False) -> bytes:
    """By its persistent id; in older files that ends with None, for a view."""
    parts = (text("storage"), f"ctorch\n{kind}\n".encode(), text(key), text("cpu"), number(numel))
    return tupled(*parts, b"N" * old) + b"Q"


def tensor(
    size: Iterable[int], stride: Iterable[int], offset: int = 0, of: bytes | None = None
) -> bytes:
    """A float32 tensor of a storage of four numbers, unless told otherwise."""
    return call(
        "torch._utils._rebuild_tensor_v2",
        storage(4) if of is None else of,
        number(offset),
        tupled(*map(number, size)),
        tupled(*map(number, stride)),
        b"\x89",
        call("collections.OrderedDict"),
    )


def archive(path: Path, value: bytes, records: Mapping[str, bytes] | None = None) -> Path:
    """What torch.save would write, but the pickle; one storage `0` of 16 bytes, if not given."""
    members = {"data.pkl": pickle(value), "byteorder": b"little"}
    members |= {f"data/{key}": data for key, data in (records or {"0": bytes(16)}).items()}
    members |= {"version": b"3\n"}
    return _zip(path, {f"w/{name}": data for name, data in members.items()})


def rewritten(path: Path, members: Mapping[str, bytes], *, twice: bool = False) -> Path:
    """An archive with other contents of some members, or more of them, and right checksums."""
    with zipfile.ZipFile(path) as there:
        content = {name: there.read(name) for name in there.namelist()}
    if not twice:
        return _zip(path, content | members)
    with zipfile.ZipFile(path, "a") as there, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for name, data in members.items():
            there.writestr(name, data)
    return path


def legacy(path: Path, value: bytes, keys: Iterable[str] = ("0",), data: bytes = b"") -> Path:
    """A file as torch < 1.6 wrote it: five pickles, then the storages."""
    system = entries({"protocol_version": number(1001), "little_endian": b"\x88"})
    numbers = data or (4).to_bytes(8, "little") + bytes(16)
    parts = (pickle(number(1001)), pickle(system), pickle(value), pickle(listed(*map(text, keys))))
    path.write_bytes(MAGIC + b"".join(parts) + numbers)
    return path


def _zip(path: Path, members: Mapping[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as made:
        for name, data in members.items():
            made.writestr(name, data)
    return path
