"""A file for torch to write an archive to, which may fail to be written."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from fuseport.exporter.interrupts import deferred

__all__ = ["sink"]


@contextmanager
def sink(path: Path) -> Iterator[IO[bytes]]:
    """The file at `path`, for `PyTorchFileWriter`.

    That one ends the process by `std::terminate` when a write fails, be it to a path or to a file
    object that raises: its destructor tries again, and throws. So this file object never does, nor
    does a signal's handler meanwhile. What failed is raised at the end.

    Raises:
        OSError: it could not be written, and is not whole.
    """
    with deferred(), path.open("wb") as file:
        made = _Sink(file)
        yield cast(IO[bytes], made)
        if made.error is not None:
            raise made.error


class _Sink(io.RawIOBase):
    """Takes all that is written, also what cannot be kept. torch goes back to its begin, at last,
    as if somebody were to read it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return offset

    def write(self, data: Any) -> int:
        if self.error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.error = error
        return len(data)
