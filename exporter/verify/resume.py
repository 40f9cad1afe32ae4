"""What a verification that was ended had found by then, for `--resume` to go on from.

A file in the cache folder, a JSON line for each job that is done, under a hash of all that its rows
depend on: the bundle, the options, the versions and the machine. So what has changed begins anew.
"""

import fcntl
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from fuseport.exporter.errors import StorageError, UsageError
from fuseport.exporter.verify.plan import Job
from fuseport.exporter.verify.report import Row
from fuseport.ops.build import cache_folder

__all__ = ["Record", "key", "recorded", "sources"]


class Record:
    """Rows by job, of this run and of the one that it goes on from.

    Args:
        done: rows that are known.
        file: to append to; None where nothing is to be kept.
    """

    def __init__(self, done: Mapping[str, tuple[Row, ...]], file: IO[bytes] | None) -> None:
        self._done = dict(done)
        self._file = file

    def rows(self, job: Job) -> tuple[Row, ...] | None:
        """Those of a job that was done before; None if it was not."""
        return self._done.get(_name(job))

    def add(self, job: Job, rows: Sequence[Row]) -> None:
        """Note that a job is done.

        Raises:
            StorageError: it cannot be written.
        """
        if self._file is None:
            return
        entry = {"job": _name(job), "rows": [asdict(row) for row in rows]}
        line = memoryview(f"{json.dumps(entry)}\n".encode())
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            raise StorageError(
                f"{self._file.name}: cannot be written: {error.strerror}; make room, and go on "
                "with --resume"
            ) from error


def key(facts: Mapping[str, Any]) -> str:
    """The hash of what rows depend on, as JSON data."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def sources(place: str | None) -> str | None:
    """A hash of code of the user's: of the file and those beside it, or the package's; None for
    none. Of a module by name, its name: it comes with the versions of what is installed."""
    if place is None:
        return None
    path = Path(place.rpartition(":")[0] or place)
    if not path.exists():
        return place
    folder = path if path.is_dir() else path.parent
    whole = hashlib.sha256()
    for file in sorted(folder.rglob("*.py") if path.is_dir() else folder.glob("*.py")):
        whole.update(f"{file.relative_to(folder)}\0".encode() + file.read_bytes() + b"\0")
    return whole.hexdigest()


@contextmanager
def recorded(name: str, *, resume: bool) -> Iterator[Record]:
    """The record under a hash from `key`; on leaving it is deleted, unless by an error.

    Args:
        name: the hash.
        resume: take over what an earlier run has done; else that is forgotten.

    Raises:
        UsageError: `resume`, and another process is at the same verification.
        StorageError: `resume`, and the cache folder cannot be written to.
    """
    path = cache_folder() / "verify" / f"{name[:32]}.jsonl"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab", buffering=0)  # no line waits, to fail when it is closed
    except OSError as error:
        if resume:
            raise StorageError(f"{path}: cannot be written: {error.strerror}") from error
        yield Record({}, None)  # a cache that cannot be written to only takes `--resume` away
        return
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if resume:
                raise UsageError(f"{path}: the same verification is at work already") from error
            yield Record({}, None)
            return
        try:
            known = path.read_bytes() if resume else b""
            # Without the half line that a killed process leaves.
            file.truncate(known.rfind(b"\n") + 1)
        except OSError as error:
            raise StorageError(f"{path}: cannot be written: {error.strerror}") from error
        try:
            yield Record(_read(known), file)
        except BaseException:
            if b"\n" in path.read_bytes():  # something is done: that is what `--resume` is for
                raise
            path.unlink(missing_ok=True)
            raise
        path.unlink(missing_ok=True)


def _name(job: Job) -> str:
    return " · ".join((job.runtime, job.artifact.name, job.program, job.way, job.case))


def _read(content: bytes) -> dict[str, tuple[Row, ...]]:
    found: dict[str, tuple[Row, ...]] = {}
    for line in content.splitlines():
        try:
            entry = json.loads(line)
            found[entry["job"]] = tuple(Row(**row) for row in entry["rows"])
        except (ValueError, KeyError, TypeError):
            continue  # cut off: that job is done again
    return found
