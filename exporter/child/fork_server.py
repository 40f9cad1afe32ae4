"""Children that are forked from a process which has imported torch, instead of started anew.

Importing torch and what else a runtime needs takes two to three seconds of a processor, for each
child; a fork of a process that did takes hundredths. That process, the fork server, runs
nothing else, so that no thread pool and no state of a computation is inherited. It is of use on
Linux alone: elsewhere system libraries do not survive a fork.
"""

import functools
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

__all__ = ["MARK", "PARENT", "READ_LATE", "ForkServer", "Forked", "current", "marks", "preloaded"]

MARK = "FUSEPORT_CHILDREN"
"""The environment variable with the marks by which a child's descendants are known as such."""

PARENT = "FUSEPORT_PARENT"
"""That with the process id of what a child was started or forked by."""

READ_LATE = (
    "FUSEPORT_",
    "PYTEST_",
    "TORCHINDUCTOR_",
    "_TORCHINDUCTOR_",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
)
"""How environment variables begin that are read when they are needed; torch and Lightning set some
of them by themselves."""

_SERVER = "fuseport.exporter.child._fork_server"
_READY_SECONDS = 120.0  # for its imports
_lock = threading.Lock()
_scopes: dict[object, "ForkServer | None"] = {}  # in order; None where none is wanted


@contextmanager
def preloaded(modules: Sequence[str], *, wanted: bool = True) -> Iterator[None]:
    """Have children forked within, where that is possible and their circumstances are the same.

    Args:
        modules: that the server imports, those of them that are here; of the outermost such context
            if there are several.
        wanted: whether they are to be; on a GPU nobody has tried what its driver makes of it.
    """
    known = current() if wanted else None
    server = known or (ForkServer(modules) if wanted and _possible() else None)
    scope = object()
    try:
        with _lock:
            _scopes[scope] = server
        yield
    finally:
        with _lock:
            del _scopes[scope]
        if server is not known and server is not None:
            server.close()


def current() -> "ForkServer | None":
    """The server that would fork a child now; None where it is to be started anew."""
    with _lock:
        server = next(reversed(_scopes.values()), None)
    return server if server is not None and server.fits() else None


@functools.cache
def _possible() -> bool:
    """Whether this system has what the server needs; of Linux, kernels before 5.3 lack it."""
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:  # some sandboxes have no such system call either
        return False
    return True


def _circumstances() -> tuple[str, dict[str, str]]:
    """What a process takes over from the one that starts it, and cannot be told later: libraries
    read the environment as they are loaded."""
    return os.getcwd(), {k: v for k, v in os.environ.items() if not k.startswith(READ_LATE)}


class Forked:
    """A child of the server; what of `subprocess.Popen` is used of children.

    Attributes:
        pid: of the process; no other gets that number before `wait` is over.
        stdin: a pipe to its standard input.
        returncode: as of `Popen`; None before `wait`.
    """

    def __init__(self, pid: int, stdin: int, connection: socket.socket) -> None:
        self.pid = pid
        self.stdin = os.fdopen(stdin, "wb")
        self.returncode: int | None = None
        self._connection = connection

    def wait(self) -> int:
        """How it ended, once it has."""
        if self.returncode is None:
            with self._connection:
                answer = _received(self._connection)
            # Without the server all its children are killed.
            self.returncode = -9 if answer is None else int(answer["code"])
        return self.returncode


class ForkServer:
    """The process, from its start, which takes seconds that are not waited for, to `close`.

    Args:
        modules: that it imports.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self._circumstances = _circumstances()
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", _SERVER, str(theirs.fileno()), *modules],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
                # A child writes its own mark over this place, where other processes see it.
                env={**os.environ, MARK: marks("0" * 32)},
            )

    def fits(self) -> bool:
        """Whether a child of it would be as one that this process starts now."""
        return self._circumstances == _circumstances() and self._popen.poll() is None

    def start(self, arguments: Sequence[str], errors: int, mark: str) -> Forked | None:
        """Run a module in a child.

        Args:
            arguments: of `python -m`.
            errors: descriptor of its standard error.
            mark: 32 characters, for `MARK`.

        Returns:
            The child; None if the server is dead, or could not fork.
        """
        own = {k: v for k, v in os.environ.items() if k.startswith(READ_LATE)}
        request = {"arguments": list(arguments), "environment": {**own, MARK: marks(mark)}}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        read, write = os.pipe()
        answer = None
        try:
            with suppress(OSError):
                with theirs, _lock:
                    passed = [theirs.fileno(), read, errors]
                    socket.send_fds(self._ours, [json.dumps(request).encode()], passed)
                ours.settimeout(_READY_SECONDS)
                answer = _received(ours)
        finally:
            os.close(read)
            if answer is None:  # with the connection the server takes the child away
                ours.close()
                os.close(write)
        if answer is None:
            return None
        ours.settimeout(None)
        return Forked(answer["pid"], write, ours)

    def close(self) -> None:
        """End it, and what it forked."""
        self._ours.close()
        self._popen.kill()
        self._popen.wait()


def marks(own: str) -> str:
    """The value of `MARK` for a child: of those that this process is a child of, and its own."""
    return " ".join(filter(None, (os.environ.get(MARK), own)))


def _received(connection: socket.socket) -> Mapping[str, Any] | None:
    """A message of the server; None if there will be no more."""
    with suppress(ConnectionError):
        if message := connection.recv(2**16):
            content: Mapping[str, Any] = json.loads(message)
            return content
    return None
