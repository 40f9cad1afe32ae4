"""The operations of a pickle, one by one, within limits: no text is decoded that could fill memory.

The standard library's `pickletools.genops` reads each argument whole, whatever its length, and goes
on as long as the file does.
"""

import pickletools
from collections.abc import Iterator
from dataclasses import dataclass
from io import SEEK_END, BytesIO
from typing import BinaryIO

__all__ = ["OPERATIONS", "LongText", "MalformedPickleError", "operations"]

# A tensor takes about 22, three with its optimizer's state 90: enough for 45,000 tensors, or 11,000
# parameters in training. It bounds the time and memory that a refusal takes.
OPERATIONS = 1_000_000
_LONG = 2**20
_LINE = 2**16

_TABLE = {op.code.encode("latin-1"): op for op in pickletools.opcodes}
# How many bytes the length of an argument has, by what pickletools calls it.
_WIDTHS = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}


class MalformedPickleError(ValueError):
    """The bytes are no pickle, or one that no pickler writes."""


@dataclass(frozen=True)
class LongText:
    """A text or bytes of over 1 MiB, which was passed over."""

    bytes: int


def operations(
    stream: BinaryIO, most: int = OPERATIONS
) -> Iterator[tuple[pickletools.OpcodeInfo, object]]:
    """Each operation of the next pickle of `stream`, and its argument or None.

    The argument of `GLOBAL` and `INST` is a pair (module, attribute), that of a long text a
    `LongText`.

    Raises:
        MalformedPickleError, ValueError: the pickle is cut off, is none, or has operations without
            end.
    """
    for _ in range(most):
        code = stream.read(1)
        opcode = _TABLE.get(code)
        if opcode is None:
            what = f"unknown opcode {code!r}" if code else "it ends early"
            raise MalformedPickleError(f"malformed pickle ({what})")
        yield opcode, None if opcode.arg is None else _argument(opcode, opcode.arg, stream)
        if code == b".":
            return
    raise MalformedPickleError(f"a pickle of over {most} operations, beyond any checkpoint's")


def _argument(
    opcode: pickletools.OpcodeInfo, kind: pickletools.ArgumentDescriptor, stream: BinaryIO
) -> object:
    if kind.n in _WIDTHS:
        return _counted(kind.name, _WIDTHS[kind.n], stream)
    if opcode.name in ("GLOBAL", "INST"):
        return _line(stream)[:-1].decode("utf-8", "replace"), _line(stream)[:-1].decode(
            "utf-8", "replace"
        )
    return kind.reader(BytesIO(_line(stream)) if kind.n == pickletools.UP_TO_NEWLINE else stream)


def _counted(kind: str, width: int, stream: BinaryIO) -> object:
    count = int.from_bytes(_exactly(stream, width), "little")
    if kind.startswith("long"):
        if count > _LONG:
            raise MalformedPickleError(f"an integer of {count} bytes")
        return int.from_bytes(_exactly(stream, count), "little", signed=True)
    if count > _LONG:
        begin = stream.tell()
        # Held against the file's end first: no file system seeks as far as a length can say.
        if count > stream.seek(0, SEEK_END) - begin:
            raise MalformedPickleError(f"malformed pickle (a text of {count} bytes ends early)")
        stream.seek(begin + count)
        return LongText(count)
    data = _exactly(stream, count)
    if kind.startswith("bytes") or kind.startswith("bytearray"):
        return data
    if kind.startswith("unicode"):
        return data.decode("utf-8", "surrogatepass")
    return data.decode("latin-1")


def _line(stream: BinaryIO) -> bytes:
    line = stream.readline(_LINE)
    if not line.endswith(b"\n"):
        raise MalformedPickleError("malformed pickle (a line without its end)")
    return line


def _exactly(stream: BinaryIO, count: int) -> bytes:
    data = stream.read(count)
    if len(data) != count:
        raise MalformedPickleError("malformed pickle (it ends early)")
    return data
