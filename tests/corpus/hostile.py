"""Checkpoints that are to be refused, each made by a function, with the fault and exit code.

The faults have the numbers of the project's list of bad inputs; see tests/test_corpus.py.
"""

import functools
import os
import pickle as picklers
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fuseport.tests.corpus.pickled import (
    archive,
    call,
    entries,
    legacy,
    listed,
    number,
    pickle,
    rewritten,
    storage,
    tensor,
    text,
    tupled,
)

__all__ = ["HOSTILE", "Hostile", "Make"]

Make = Callable[[Path], Path]


@dataclass(frozen=True)
class Hostile:
    """A file or folder that is refused.

    Attributes:
        name: of it.
        fault: its number in the list of faults.
        code: what the command ends with: 3 unsafe, 4 corrupt.
        make: writes it into an empty folder and returns its path. What it would run makes a file
            `canary` there.
        says: a part of the message.
    """

    name: str
    fault: int
    code: int
    make: Make
    says: str


def weights() -> dict[str, Tensor]:
    return {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.ones(2)}


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, (f"touch '{self.folder}/canary'",)


# Fault 1: code in a pickle, whatever the file is called.


def _saved(folder: Path, name: str, form: str) -> Path:
    path = folder / name
    value = {"state_dict": weights(), "x": Touch(folder)}
    if form == "plain":
        path.write_bytes(picklers.dumps({"x": Touch(folder)}, protocol=4))
    else:
        torch.save(value, path, _use_new_zipfile_serialization=form == "zip")
    return path


def _raw(data: bytes, folder: Path) -> Path:
    # A touch's shell command has the folder's name, which is known here only.
    (folder / "w").write_bytes(data.replace(b"FOLDER", bytes(folder)))
    return folder / "w"


def _code() -> Iterable[Hostile]:
    names = ("w.ckpt", "w.bin", "w.pth", "w.pkl", "w.dat", "w", "w.safetensors")
    for name, form in zip(
        names, ("zip", "legacy", "plain", "zip", "legacy", "plain", "zip"), strict=True
    ):
        yield Hostile(
            f"code in {name}, {form}",
            1,
            3,
            functools.partial(_saved, name=name, form=form),
            "system",
        )
    touch = b"touch FOLDER/canary"
    argument = b"S'" + touch + b"'\n"
    for name, data, says in (
        ("INST", b"(" + argument + b"ios\nsystem\n.", "os.system"),
        ("OBJ", b"(cos\nsystem\n" + argument + b"o.", "os.system"),
        ("Python 2's name", pickle(call("__builtin__.eval", text("1"))), "builtins.eval"),
        ("EXT1", b"\x80\x02\x82\x01.", "copyreg.extension"),
        (
            "computed name",
            b"\x80\x04" + text("os") + call("builtins.str", text("system")) + b"\x93.",
            "computed",
        ),
        (
            "getattr",
            pickle(call("builtins.getattr", b"cos\nsystem\n", text("x"))),
            "builtins.getattr",
        ),
        ("torch.load", pickle(call("torch.serialization.load", text("x"))), "serialization.load"),
    ):
        yield Hostile(f"code by {name}", 1, 3, functools.partial(_raw, data), says)
    system = call("posix.system", text("true"))
    yield Hostile(
        "code after a broken call",
        1,
        3,
        lambda f: archive(
            f / "w", entries({"a": call("builtins.bytearray", number(2**40)), "b": system})
        ),
        "posix.system",
    )
    yield Hostile(
        "code in the list of storages",
        1,
        3,
        lambda f: _append(legacy(f / "w", entries({}), ()), system),
        "posix.system",
    )


def _append(path: Path, value: bytes) -> Path:
    """Puts a value into the last pickle of a file of the older format."""
    data = path.read_bytes()
    at = data.rindex(b"](e.")
    path.write_bytes(data[:at] + b"](" + value + b"e." + data[at + 4 :])
    return path


# Fault 2: damage; fault 3: programs; fault 6: a flipped bit.


def _cut(folder: Path, zipped: bool, keep: float) -> Path:
    torch.save(weights(), folder / "w", _use_new_zipfile_serialization=zipped)
    data = (folder / "w").read_bytes()
    size = int(keep) if keep in (0, 4) else len(data) - 1 if keep == 1 else int(keep * len(data))
    (folder / "w").write_bytes(data[:size])
    return folder / "w"


def _tar(folder: Path, form: int) -> Path:
    torch.save(weights(), folder / "x")
    with tarfile.open(folder / "w.tar", "w", format=form) as made:
        made.add(folder / "x", "pickle")
    data = (folder / "w.tar").read_bytes()
    if form == tarfile.GNU_FORMAT:  # as archives before 1988 are, without a signature
        head = data[:148] + b" " * 8 + data[156:257] + bytes(8) + data[265:512]
        data = head[:148] + b"%06o\0 " % sum(head) + head[156:] + data[512:]
    (folder / "w").write_bytes(data)
    return folder / "w"


def _script(folder: Path) -> Path:
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(folder / "w.ckpt"))
    return folder / "w.ckpt"


def _exported(folder: Path) -> Path:
    program = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
    torch.export.save(program, folder / "w.pt2")
    return (folder / "w.pt2").rename(folder / "w.ckpt")


def _flipped(folder: Path, member: str) -> Path:
    torch.save(weights(), folder / "w")
    data = bytearray((folder / "w").read_bytes())
    with zipfile.ZipFile(folder / "w") as there:
        info = there.getinfo(member)
    begin = info.header_offset + 30
    name, extra = struct.unpack("<HH", data[begin - 4 : begin])
    data[begin + name + extra] ^= 1
    (folder / "w").write_bytes(data)
    return folder / "w"


def _damage() -> Iterable[Hostile]:
    for zipped in (True, False):
        for keep in (0, 4, 0.5, 1):
            make = functools.partial(_cut, zipped=zipped, keep=keep)
            yield Hostile(f"cut at {keep}, {'zip' if zipped else 'legacy'}", 2, 4, make, "")
    for name, value, says in (
        ("an unknown opcode", b"\xff", "unknown opcode"),
        ("a stack that is too short", b"\x85", "too short"),
        ("nothing remembered", b"h\x05", "KeyError"),
        ("a line without end", b"cos", "without its end"),
        ("a text beyond the end", b"X\xff\xff\xff\x7fabc", "ends early"),
        ("bytes", b"\x8e" + (2).to_bytes(8, "little") + b"ab", "torch cannot read"),
        ("a value twice", b"N2\x86", "torch cannot read"),
        ("an integer of a gigabyte", b"\x8b\x00\x00\x00\x40abc", "an integer of"),
        ("a text of 2**64", b"\x8d" + b"\xff" * 8, "a text of"),
        # Further than a file system seeks.
        ("a text of 2**45", b"\x8d" + (2**45).to_bytes(8, "little"), "ends early"),
    ):
        yield Hostile(name, 2, 4, lambda f, v=value: archive(f / "w", v), says)  # type: ignore[misc]
    for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT):
        make = functools.partial(_tar, form=form)
        yield Hostile(
            f"tar archive {form}", 2, 4, make, "tar archive" if form == 0 else "not recog"
        )
    yield Hostile("a TorchScript archive", 3, 3, _script, "TorchScript")
    yield Hostile("an exported program", 3, 3, _exported, "exported program")
    for member in ("w/data/0", "w/data.pkl", "w/version"):
        yield Hostile(
            f"a flipped bit in {member}",
            6,
            4,
            functools.partial(_flipped, member=member),
            "checksum",
        )


# Fault 7: sizes; fault 8: bombs.


def _with(value: bytes, records: dict[str, bytes] | None = None) -> Make:
    return lambda folder: archive(folder / "w.pt", entries({"w": value}), records)


def _beside(value: bytes) -> Make:
    """A right tensor, and something else in the file."""
    return _with(tensor([4], [1]) + text("x") + value)


def _sizes() -> Iterable[Hostile]:
    qtensor = (storage(4, kind="QInt8Storage"), number(0), tupled(number(2**40)), tupled(number(1)))
    copied = "torch._utils._rebuild_device_tensor_from_cpu_tensor"
    wrapped = "torch._tensor._rebuild_from_type_v2"
    expanded = tensor([2**33], [0])
    beyond = "beyond its storage"
    for name, make, says in (
        ("terabytes by stride 0", _with(tensor([2**40], [0])), "claim"),
        ("sizes beyond the storage", _with(tensor([200], [1])), beyond),
        ("an offset beyond the storage", _with(tensor([4], [1], 1)), beyond),
        ("strides beyond the storage", _with(tensor([2, 2], [9, 1])), beyond),
        ("a negative size", _with(tensor([-1], [1])), "negative"),
        ("a negative stride", _with(tensor([2], [-1])), "negative"),
        ("a negative offset", _with(tensor([2], [1], -1)), "negative"),
        ("sizes that overflow", _with(tensor([2**32, 2**32], [0, 0])), "overflow"),
        ("a stride that overflows", _with(tensor([2], [2**62])), "overflow"),
        ("a thousand dimensions", _with(tensor([1] * 1000, [1] * 1000)), "no dimensions"),
        ("fewer strides than sizes", _with(tensor([2, 2], [1])), "no dimensions"),
        ("a storage beyond its record", _with(tensor([4], [1], of=storage(2**40))), "claims"),
        ("a storage without record", _with(tensor([4], [1], of=storage(4, "7"))), "none"),
        ("a negative storage", _with(tensor([4], [1], of=storage(-1))), "no storage"),
        (
            "a storage of unknown type",
            _with(tensor([4], [1], of=storage(4, kind="Size"))),
            "unknown type",
        ),
        (
            "one storage in two sizes",
            _with(tensor([4], [1]) + text("x") + tensor([2], [1], of=storage(2))),
            "two sizes",
        ),
        (
            "a bytearray of a terabyte",
            _beside(call("builtins.bytearray", number(2**40))),
            "bytearray",
        ),
        (
            "a storage that is made",
            _beside(call("torch.storage.UntypedStorage", number(2**40))),
            "UntypedStorage",
        ),
        ("a tensor that is made", _beside(call("torch.Tensor", number(2**40))), "torch.Tensor"),
        (
            "a state for a tensor",
            _beside(tensor([4], [1]) + tupled(number(1)) + b"b"),
            "a state for",
        ),
        (
            "a text in punycode",
            _beside(call("_codecs.encode", text("ü" * 9), text("punycode"))),
            "Latin-1",
        ),
        (
            "a quantised tensor beyond",
            _with(call("torch._utils._rebuild_qtensor", *qtensor)),
            beyond,
        ),
        (
            "an expanded tensor copied",
            _beside(call(copied, expanded, b"ctorch\nfloat64\n", text("cpu"), b"\x89")),
            "expanded",
        ),
        (
            "a call in a call",
            _beside(call(wrapped, b"cbuiltins\nbytearray\n", b"N", tupled(number(2**40)), b"N")),
            "bytearray",
        ),
        (
            "an older file: sizes beyond",
            lambda f: legacy(f / "w", entries({"w": tensor([5], [1])})),
            beyond,
        ),
        (
            "an older file: no list of storages",
            lambda f: legacy(f / "w", entries({"w": tensor([4], [1])}), ()),
            "list of storages",
        ),
        (
            "an older file: storages beyond",
            lambda f: legacy(f / "w", entries({"w": tensor([9], [1], of=storage(2**40))})),
            "claim",
        ),
    ):
        yield Hostile(name, 7, 4, make, says)


def _malformed() -> Iterable[Hostile]:
    """Calls and storages whose parts are not what torch writes."""
    wrapped = "torch._tensor._rebuild_from_type_v2"
    plain, third = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"
    sizes = (number(0), tupled(number(4)), tupled(number(1)), b"\x89", b"N")
    kinds = tensor([4], [1]) + text("x") + tensor([4], [1], of=storage(4, kind="IntStorage"))
    for name, value, says in (
        ("a call of a number", number(1) + tupled() + b"R", "no function"),
        ("a tensor of unknown parts", call(wrapped, b"N"), "parts are not known"),
        ("a tensor of unknown sizes", call(plain, storage(4), number(0), b"N"), "sizes are not"),
        ("a tensor of unknown dtype", call(third, storage(4), *sizes, text("x")), "unknown dtype"),
        ("a text in three parts", call("_codecs.encode", text("a"), b"N", b"N"), "Latin-1"),
        ("one storage in two types", kinds, "two types"),
    ):
        yield Hostile(name, 7, 4, _beside(value) if value is not kinds else _with(value), says)
    view = storage(4).replace(b"tQ", tupled(text("0"), number(0), number(4)) + b"tQ")
    yield Hostile("a view of a storage", 7, 4, _with(tensor([4], [1], of=view)), "torch < 0.4")


def _doubling(times: int = 60) -> bytes:
    """A list of lists, each of two references to the one before."""
    return listed(b"]q\x00", *(b"](h%ch%ceq%c" % (i, i, i + 1) for i in range(times)))


def _lightning(value: bytes, key: str = "hyper_parameters") -> Make:
    state = {"state_dict": entries({"w": tensor([4], [1])}), key: value}
    state["pytorch-lightning_version"] = text("2.5.0")
    return lambda folder: archive(folder / "w.ckpt", entries(state))


def _deflated(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "w", "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("w/data.pkl", bytes(2**26))
    return folder / "w"


def _twice(folder: Path, name: str) -> Path:
    torch.save(weights(), folder / "w")
    return rewritten(folder / "w", {name: pickle(entries({"w": b"N"}))}, twice=True)


def _two_directories(folder: Path) -> Path:
    """Python finds the second archive's directory, torch the first's."""
    first = archive(folder / "first", entries({"w": tensor([200], [1])})).read_bytes()
    second = archive(folder / "w", entries({"w": tensor([4], [1])})).read_bytes()
    (folder / "w").write_bytes(first + second)
    return folder / "w"


def _many_members(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "w", "w") as made:
        made.writestr("w/data.pkl", b"")
        info = made.infolist()[0]
        # The same member under 100,000 names; a directory alone is what is to be refused.
        made.filelist += [_named(info, f"w/data/{i}") for i in range(100_000)]
    return folder / "w"


def _named(info: zipfile.ZipInfo, name: str) -> zipfile.ZipInfo:
    other = zipfile.ZipInfo(name)
    other.header_offset, other.CRC = info.header_offset, 0
    return other


def _bombs() -> Iterable[Hostile]:
    array = call("numpy._core.multiarray._reconstruct")
    shaped = array + tupled(number(1), _doubling(), b"\x89", b"N", text("")) + b"b"
    deep = b"]" * 100_000 + b"a" * 99_999
    tuples = b")" + b"".join(b"q\xf0h\xf0\x86" for _ in range(60))
    megabyte = text("x" * 1_000_000) + b"q\x01" + listed(*[b"h\x01"] * 99_000)
    operations = b"N" * 2_000_001
    yield Hostile("an archive that inflates", 8, 4, _deflated, "compressed")
    for name, make, says in (
        ("references that double", _lightning(_doubling()), "nested"),
        ("100,000 lists", _lightning(deep), "nested"),
        ("tuples that double", _with(tensor([4], [1]) + tuples + b"N"), "tuples"),
        ("100,000 tuples", _with(tensor([4], [1]) + b")" + b"\x85" * 100_000 + b"N"), "tuples"),
        ("the shape of an array", _lightning(shaped), "shape"),
        ("a megabyte in 99,000 places", _lightning(listed(megabyte)), "characters"),
        ("two million operations", _beside(operations + b"0" * 2_000_000), "operations"),
    ):
        yield Hostile(name, 8, 4, make, says)
    for name in ("w/data.pkl", "w/DATA.PKL"):
        yield Hostile(
            f"{name} beside data.pkl", 8, 4, functools.partial(_twice, name=name), "twice"
        )
    yield Hostile("an archive before the archive", 8, 4, _two_directories, "directory")
    yield Hostile("100,001 members", 8, 4, _many_members, "members")


HOSTILE = (*_code(), *_damage(), *_sizes(), *_malformed(), *_bombs())
