"""A folder or file that appears whole or not at all: staged beside it, put there by a rename.

What is staged is locked for as long as its process lives. So what a killed process has left is told
from what another one is at, and is removed by the next writer to the same place.
"""

import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from fuseport.exporter.errors import StorageError
from fuseport.exporter.interrupts import deferred

__all__ = ["replaced", "resolved", "work_folder", "write_whole"]

_STAGING = ".staging-"
_NAME_LIMIT = 200  # bytes of a target's name that its staged file has: with the rest, below 255
_WORK = f"fuseport-work{_STAGING}"


@contextmanager
def replaced(target: Path, check: Callable[[], None]) -> Iterator[Path]:
    """A folder to fill; on leaving, it is at `target`, in place of what was there.

    If the body raises, or the process dies, `target` stays as it was; what a dead process left is
    removed by the next call.

    Args:
        target: its parent folders are made, and stay.
        check: raises where `target` must not be replaced; called at the begin and at the end.

    Raises:
        StorageError: writing failed: no space, no permission.
    """
    # First, for a target that is not to be replaced may have something abandoned beside it, too.
    with suppress(OSError):
        _remove_abandoned(target.parent, _prefix(target))
    check()
    target = target.absolute()
    with deferred() as lifted:
        folder, lock = _begun(target, folder=True)
        try:
            with lifted():
                yield folder
                _share(folder)
                _sync(folder)
            with _alone_in(target.parent):
                check()  # again: another process may have been quicker
                _swap_in(folder, target)
            _confirm(target)
        except (OSError, SafetensorError) as error:
            raise StorageError(
                f"{target}: cannot be written: {_reason(error)}; nothing was changed"
            ) from error
        finally:
            _remove(folder)
            _close(lock)


def resolved(path: Path) -> Path:
    """What a path points to, be it there or not.

    Raises:
        OSError, RuntimeError: it points to itself.
    """
    found = path.resolve()
    if found.is_symlink():  # Python 3.13 leaves it so
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return found


def write_whole(target: Path, content: bytes) -> None:
    """Write a file: `target` has all of the content, or stays as it was.

    Its parent folders are made, and stay. A link stays one, and what it points to is replaced. A
    device or a pipe cannot be replaced: it is written to.

    Raises:
        StorageError: writing failed: no space, no permission, or a folder is there.
    """
    try:
        target = resolved(target)
        if target.exists() and not target.is_file() and not target.is_dir():
            target.write_bytes(content)
            return
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    except (OSError, RuntimeError) as error:  # RuntimeError: a link that points to itself
        raise StorageError(f"{target}: cannot be written: {_reason(error)}") from error
    with deferred():
        staged, lock = _begun(target, folder=False)
        try:
            if target.exists():
                os.fchmod(lock, target.stat().st_mode & 0o777)
            with os.fdopen(os.dup(lock), "wb") as file:
                file.write(content)
            os.fsync(lock)
            staged.replace(target)
            _confirm(target)
        except OSError as error:
            raise StorageError(f"{target}: cannot be written: {_reason(error)}") from error
        finally:
            _remove(staged)
            _close(lock)


@contextmanager
def work_folder() -> Iterator[Path]:
    """A temporary folder, gone on leaving; what killed processes of this user left is removed."""
    parent = Path(tempfile.gettempdir())
    with deferred() as lifted:
        try:
            _remove_abandoned(parent, _WORK)
            folder, lock = _new(parent, _WORK, folder=True)
        except OSError as error:
            raise StorageError(f"{parent}: cannot be written: {_reason(error)}") from error
        try:
            with lifted():
                yield folder
        finally:
            _remove(folder)
            _close(lock)


def _begun(target: Path, *, folder: bool) -> tuple[Path, int]:
    """What is to be put at `target`, as of `_new`, once its parents are there."""
    prefix = _prefix(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target.parent, prefix)
        return _new(target.parent, prefix, folder=folder)
    except OSError as error:
        raise StorageError(f"{target}: cannot be written: {_reason(error)}") from error


def _prefix(target: Path) -> str:
    """Of the names of what is staged for `target`, beside it."""
    return f".{os.fsdecode(os.fsencode(target.name)[:_NAME_LIMIT])}{_STAGING}"


def _new(parent: Path, prefix: str, *, folder: bool) -> tuple[Path, int]:
    """A new folder or file, and an open descriptor that locks it while this process lives."""
    while True:
        path = parent / f"{prefix}{secrets.token_hex(8)}"
        if folder:
            path.mkdir(mode=0o700 if prefix == _WORK else 0o777)
        # Until it is locked, another writer may take it for abandoned and remove it: then again.
        try:
            flags = os.O_RDONLY if folder else os.O_WRONLY | os.O_CREAT | os.O_EXCL
            descriptor = os.open(path, flags, 0o666)
        except OSError as error:
            if folder and isinstance(error, FileNotFoundError):
                continue
            _remove(path)
            raise
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if path.exists():
                return path, descriptor
        except OSError:
            _remove(path)
            _close(descriptor)
            raise
        _close(descriptor)


def _remove_abandoned(parent: Path, prefix: str) -> None:
    """Delete what writers to the same place left when they were killed."""
    named = re.compile(f"{re.escape(prefix)}[0-9a-f]{{16}}")
    for path in [path for path in parent.iterdir() if named.fullmatch(path.name)]:
        with suppress(OSError):  # locked: somebody is at it; or gone by now; or another user's
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(path)
            finally:
                _close(descriptor)


def _remove(path: Path) -> None:
    """Delete a file or folder that is of no more use.

    Tried again once: a system call that fails for a moment should leave nothing. What cannot be
    deleted now, the next writer deletes.
    """
    for _ in range(2):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        _sync_one(path)


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        _close(descriptor)


def _share(folder: Path) -> None:
    """Give files the mode that new files have here; some writers keep theirs to the user alone."""
    mode = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)


@contextmanager
def _alone_in(parent: Path) -> Iterator[None]:
    """No other process checks or replaces a target in this folder meanwhile."""
    descriptor = os.open(parent, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        _close(descriptor)


def _swap_in(folder: Path, target: Path) -> None:
    """Put `folder` there; what was there ends under the name `folder`, to be deleted."""
    try:
        folder.rename(target)  # POSIX lets a folder replace an empty one
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        _exchange(folder, target)


def _confirm(target: Path) -> None:
    """Have the disk keep the name of what is there now."""
    try:
        _sync_one(target.parent)
    except OSError as error:
        raise StorageError(
            f"{target}: is written, but may not outlast a power failure: {_reason(error)}"
        ) from error


def _close(descriptor: int) -> None:
    """Close what holds a lock, or was synced: if that fails, nothing is lost."""
    with suppress(OSError):
        os.close(descriptor)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _exchange(one: Path, other: Path) -> None:
    """Swap two paths in one step: RENAME_EXCHANGE of renameat2(2), RENAME_SWAP on macOS."""
    swap = 2  # the flag's value on both systems
    libc = ctypes.CDLL(None, use_errno=True)
    paths = os.fsencode(one), os.fsencode(other)
    at_cwd = -100
    try:
        if sys.platform == "darwin":
            failed = libc.renamex_np(*paths, swap)
        else:
            failed = libc.renameat2(at_cwd, paths[0], at_cwd, paths[1], swap)
    except AttributeError:  # an old C library
        failed = True
        ctypes.set_errno(errno.ENOSYS)
    if failed:
        code = ctypes.get_errno()
        if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise StorageError(
                f"{other}: this file system cannot replace a folder in one step; give a new "
                "one; nothing was changed"
            )
        raise OSError(code, os.strerror(code), str(other))
