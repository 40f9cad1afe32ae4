"""A folder or file that appears whole or not at all: staged beside it, put there by a rename."""

import ctypes
import errno
import fcntl
import glob
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from fuseport.exporter.errors import StorageError

__all__ = ["replaced", "work_folder", "write_whole"]

_STAGING = ".staging-"


@contextmanager
def replaced(target: Path, check: Callable[[], None]) -> Iterator[Path]:
    """A folder to fill; on leaving, it is at `target`, in place of what was there.

    If the body raises, or the process dies, `target` stays as it was; what a dead process left is
    removed by the next call.

    Args:
        target: its parent folders are made.
        check: raises where `target` must not be replaced; called at the begin and at the end.

    Raises:
        StorageError: writing failed: no space, no permission.
    """
    check()
    target = target.absolute()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target)
        folder, lock = _new_sibling(target)
    except OSError as error:
        raise StorageError(f"{target}: cannot be written: {error.strerror}") from error
    try:
        yield folder
        _share(folder)
        _sync(folder)
        check()  # again: another process may have been quicker
        _swap_in(folder, target)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise StorageError(f"{target}: cannot be written: {reason}; nothing was changed") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def write_whole(target: Path, content: bytes) -> None:
    """Write a file: `target` has all of the content, or stays as it was.

    Its parent folders are made. A link stays one, and what it points to is replaced. A device or a
    pipe cannot be replaced: it is written to.

    Raises:
        StorageError: writing failed: no space, no permission, or a folder is there.
    """
    try:
        target = target.resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists() and not target.is_file() and not target.is_dir():
            target.write_bytes(content)
            return
        _write_beside(target, content)
    except (OSError, RuntimeError) as error:  # RuntimeError: a link that points to itself
        reason = getattr(error, "strerror", None) or str(error)
        raise StorageError(f"{target}: cannot be written: {reason}") from error


def _write_beside(target: Path, content: bytes) -> None:
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    staged = target.with_name(f".{secrets.token_hex(8)}{_STAGING}file")
    try:
        # As a new file, so that it gets the mode that new files have here.
        with staged.open("xb") as file:
            if target.exists():
                os.fchmod(file.fileno(), target.stat().st_mode & 0o777)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        staged.replace(target)
    finally:
        staged.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _share(folder: Path) -> None:
    """Give files the mode that new files have here; some writers keep theirs to the user alone."""
    mode = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def _swap_in(folder: Path, target: Path) -> None:
    """Put `folder` there; what was there ends under the name `folder`, to be deleted."""
    try:
        folder.rename(target)  # POSIX lets a folder replace an empty one
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        _exchange(folder, target)
    descriptor = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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


def _new_sibling(target: Path) -> tuple[Path, int]:
    """A folder beside `target`, and an open descriptor that locks it while this process lives."""
    while True:
        folder = target.with_name(f".{target.name}{_STAGING}{secrets.token_hex(8)}")
        folder.mkdir()
        # Until it is locked, another export may take it for abandoned and remove it: then again.
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            continue
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if folder.exists():
            return folder, descriptor
        os.close(descriptor)


def _remove_abandoned(target: Path) -> None:
    """Delete what exports to the same target left when they were killed."""
    for folder in target.parent.glob(f"{glob.escape(f'.{target.name}{_STAGING}')}*"):
        with suppress(OSError):  # locked: somebody is at it; or gone by now
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


@contextmanager
def work_folder() -> Iterator[Path]:
    """A temporary folder, gone on leaving."""
    with tempfile.TemporaryDirectory(prefix="fuseport-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)
