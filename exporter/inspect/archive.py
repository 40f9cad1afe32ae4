"""Members of an artifact that is a zip archive, read under limits."""

import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from fuseport.exporter.checkpoint import zip_file
from fuseport.exporter.checkpoint.content import show
from fuseport.exporter.errors import CorruptInput, UnsafeInput

__all__ = ["Archive", "opened"]

_TEXT_LIMIT = 512 * 2**20  # the JSON of a graph of a million nodes is about that large
_INFLATED = 64 * 2**20  # torch compresses nothing but the code of TorchScript


class Archive:
    """An archive without what torch puts before each name; `members` are sizes by name."""

    def __init__(self, path: Path, archive: zipfile.ZipFile) -> None:
        self._path, self._archive = path, archive
        inflated = sum(info.file_size for info in archive.infolist())
        if inflated > path.stat().st_size + _INFLATED:
            raise CorruptInput(
                f"{show(path)}: it inflates to {inflated} bytes, which no artifact does; write the"
                " artifact again"
            )
        self._full: dict[str, str] = {}
        self.members: dict[str, int] = {}
        names = archive.namelist()
        roots = {name.partition("/")[0] for name in names}
        # Of an archive that is cut off, what is found is the directory of an archive inside it.
        if min((info.header_offset for info in archive.infolist()), default=0) > 0:
            raise CorruptInput(f"{show(path)}: damaged (its members do not begin at its start)")
        for info in archive.infolist():
            name = info.filename
            if ".." in PurePosixPath(name).parts or name.startswith("/") or "\\" in name:
                raise UnsafeInput(
                    f"{show(path)}: {show(name)}: a member that leads out of the archive; get the"
                    " file from a source you trust"
                )
            inner = name.partition("/")[2] if len(roots) == 1 else name
            self._full[inner], self.members[inner] = name, info.file_size

    def read(self, name: str) -> bytes:
        """The content of a member, its checksum checked.

        Raises:
            CorruptInput: there is none, it is too large to be text, or damaged.
        """
        if name not in self.members:
            raise CorruptInput(f"{show(self._path)}: {name}: missing; write the artifact again")
        if self.members[name] > _TEXT_LIMIT:
            raise CorruptInput(f"{show(self._path)}: {show(name)}: over {_TEXT_LIMIT} bytes")
        return self._archive.read(self._full[name])


@contextmanager
def opened(path: Path) -> Iterator[Archive]:
    """The archive at a path.

    Raises:
        UnsafeInput: a member leads out of it.
        CorruptInput: it is damaged, now or while it is read, or inflates beyond any artifact.
    """
    try:
        with zip_file.opened(path) as archive:
            yield Archive(path, archive)
    except (
        zlib.error,
        TypeError,
        SyntaxError,
        MemoryError,  # Python's own parser, of what nests too deep
        AttributeError,
        IndexError,
    ) as error:
        raise CorruptInput(
            f"{show(path)}: damaged ({show(f'{type(error).__name__}: {error}', 120)}); write the"
            " artifact again"
        ) from error
