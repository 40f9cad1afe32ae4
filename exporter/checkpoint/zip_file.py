"""A zip archive whose directory was held against the file, before anything reads a member.

torch has a reader of its own, which sees some archives otherwise than Python does: it takes the
directory from where the archive says it is, Python from before the archive's end; it looks names up
without regard to case. What was checked must be what is loaded.
"""

import errno
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from io import SEEK_END
from pathlib import Path
from typing import Any, BinaryIO

from fuseport.exporter.checkpoint.content import show
from fuseport.exporter.errors import CorruptInput

__all__ = ["opened", "reason"]

_MEMBERS = 100_000  # bounds what reading the directory takes; a checkpoint has one for each storage
_END = struct.Struct("<4s4H2LH")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR_64 = struct.Struct("<4sLQL")


@contextmanager
def opened(path: Path, part: BinaryIO | None = None) -> Iterator[zipfile.ZipFile]:
    """The archive at a path, or that which is a part of the file there.

    Raises:
        CorruptInput: it is damaged, now or while its members are read; it ends elsewhere than it
            says, has over 100,000 members, or two of one name.
        OSError: the file system refuses to read it.
    """
    try:
        with nullcontext(part) if part is not None else path.open("rb") as file:
            _check_end(path, file)
        with zipfile.ZipFile(part or path) as archive:
            names = [name.lower() for name in archive.namelist()]
            if len(set(names)) != len(names):
                raise CorruptInput(f"{show(path)}: a member occurs twice; save the file again")
            yield archive
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise _damaged(path, error) from error  # the directory points before the file's start
    except (
        zipfile.BadZipFile,
        zipfile.LargeZipFile,
        struct.error,
        EOFError,
        KeyError,
        OverflowError,
        RuntimeError,  # encrypted members, and methods that zipfile does not implement
        ValueError,
    ) as error:
        raise _damaged(path, error) from error


def reason(error: Exception) -> str:
    """An error of a reader, on one line."""
    first = str(error).strip().split("\n", 1)[0]
    return show(f"{type(error).__name__}: {first}" if first else type(error).__name__)


def _check_end(path: Path, file: BinaryIO) -> None:
    """The directory must end where the records of the archive's end begin, and those end the file.

    Sources: APPNOTE.TXT of PKWARE, 4.3.14 to 4.3.16.
    """
    size = file.seek(0, SEEK_END)
    position = size - _END.size
    if position < 0:
        raise zipfile.BadZipFile("it is shorter than the end of an archive")
    signature, *_, count, length, offset, comment = _record(file, _END, position)
    if signature != b"PK\x05\x06" or comment:
        raise zipfile.BadZipFile("it does not end as an archive does")
    above = position - _LOCATOR_64.size
    if above >= 0:
        signature, _, record, _ = _record(file, _LOCATOR_64, above)
        if signature == b"PK\x06\x07":
            position = above - _END_64.size
            if record != position:
                raise zipfile.BadZipFile("its end is not where it says")
            _, _, _, _, _, _, _, count, length, offset = _record(file, _END_64, position)
    if offset + length != position:
        raise zipfile.BadZipFile("its directory is not where it says")
    if count > _MEMBERS or length > size:
        raise CorruptInput(
            f"{show(path)}: {count} members, no checkpoint has as many; save the file again"
        )


def _record(file: BinaryIO, layout: struct.Struct, position: int) -> tuple[Any, ...]:
    file.seek(position)
    return layout.unpack(file.read(layout.size))


def _damaged(path: Path, error: Exception) -> CorruptInput:
    return CorruptInput(
        f"{show(path)}: a damaged or truncated archive ({reason(error)}); fetch it again"
    )
