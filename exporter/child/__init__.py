"""A child process that is watched: its time, its memory, and its end with all that it started."""

import ctypes
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

from fuseport.exporter.child import fork_server
from fuseport.exporter.child.confined import Bounds
from fuseport.exporter.child.fork_server import MARK, PARENT, Forked

__all__ = ["Child", "Limits", "die_with_parent", "ending", "pauses"]

_WATCH_SECONDS = 0.1
_PAUSES = 0.0005, 0.02  # seconds: the first and the longest between two looks
_TAIL = 2**14  # bytes of what a child printed in which its last words are looked for
_FLOOD = 2**26  # bytes of what it printed beyond which they are dropped: disks are finite


@dataclass(frozen=True)
class Limits:
    """What a child may take.

    Attributes:
        seconds: for one job, loading included.
        memory: bytes resident in the child and its children; None for no limit.
    """

    seconds: float = 900.0
    memory: int | None = None


@dataclass
class _Clock:
    """Of a job; see `Child.expect`."""

    begin: float
    stages: list[Path]

    def seconds(self) -> float:
        """How long it has run, by the files that are there."""
        while self.stages and self.stages[0].exists():
            self.stages.pop(0)
            self.begin = time.monotonic() if self.stages else float("inf")
        return time.monotonic() - self.begin


class Child:
    """A Python module in a process of its own; as a context, it is gone at the end.

    Args:
        arguments: of `python -m`.
        errors: the file that its standard error goes to, the last part of a flood; its standard
            output goes nowhere.
        limits: beyond which it is killed. Its time runs while `expect` says so.
        bounds: what it may do, as far as `confined` can do that; None where it may do what this
            process may.
        forked: whether it may be, see `fork_server`; else it is started anew in any case.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        errors: Path,
        limits: Limits,
        bounds: Bounds | None = None,
        *,
        forked: bool = True,
    ) -> None:
        self._limits = limits
        self._clock: _Clock | None = None
        self._verdict: str | None = None
        self._done = threading.Event()
        self._descendants: set[psutil.Process] = set()
        if bounds is not None:
            arguments = ["fuseport.exporter.child.confined", bounds.to_json(), *arguments]
        # What it starts inherits this, and so is known as its own after it has left its group and,
        # its parent being dead, its family. A child may have children of this class itself.
        self._mark = secrets.token_hex(16)
        # Kept open: a child may remove it. To append: what follows a flood is at the file's start.
        self._printed = errors.open("ab+", buffering=0)
        self._printed.truncate(0)
        self._popen = (self._forked(arguments) if forked else None) or self._started(arguments)
        self._process = psutil.Process(self._popen.pid)
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Child":
        self._watcher.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        if self._popen.returncode is None:
            self._kill()
        assert self._popen.stdin is not None
        with suppress(BrokenPipeError):
            self._popen.stdin.close()
        self._popen.wait()
        if self._watcher.is_alive():
            self._watcher.join()  # it looks at what is closed now
        self._printed.close()

    def expect(self, what: bool, stages: Sequence[Path] = ()) -> None:
        """Start the clock of a job, or stop it.

        Args:
            what: whether it is to run.
            stages: files; as each appears it starts anew, and with the last one it stops, even
                while whoever waits for the job is at something else.
        """
        self._clock = _Clock(time.monotonic(), list(stages)) if what else None

    def tell(self, text: str) -> None:
        """Write to its standard input."""
        assert self._popen.stdin is not None
        with suppress(BrokenPipeError):  # it ended: who asks for its answer will see that
            self._popen.stdin.write(text.encode())
            self._popen.stdin.flush()

    def ended(self) -> bool:
        """Whether it has ended, by itself or killed. It is not reaped: its group keeps its id."""
        try:
            return self._process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def last_words(self) -> str:
        """Why it ended, as far as can be told; only once it has."""
        if self._verdict is not None:
            return self._verdict
        self._kill()
        code = self._popen.wait()
        if code < 0:
            return ending(code)
        self._printed.seek(max(0, os.fstat(self._printed.fileno()).st_size - _TAIL))
        lines = self._printed.read().decode("utf-8", errors="replace").splitlines()
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no message")
        return f"{ending(code)} before its answer" + (f": {last}" if code else "")

    def _forked(self, arguments: Sequence[str]) -> Forked | None:
        server = fork_server.current()
        if server is None:
            return None
        return server.start(arguments, self._printed.fileno(), self._mark)

    def _started(self, arguments: Sequence[str]) -> "subprocess.Popen[bytes]":
        # A session of its own: a terminal's Ctrl-C reaches only the parent, which cleans up.
        own = {MARK: fork_server.marks(self._mark), PARENT: str(os.getpid())}
        return subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._printed,
            start_new_session=True,
            env={**os.environ, **own},
        )

    def _watch(self) -> None:
        while not self._done.wait(_WATCH_SECONDS):
            resident = self._resident()
            if os.fstat(self._printed.fileno()).st_size > _FLOOD:
                self._printed.truncate(0)
            clock, limits = self._clock, self._limits
            if clock is not None and clock.seconds() > limits.seconds:
                self._verdict = f"stopped after {limits.seconds:g} s without an answer"
            elif limits.memory is not None and resident > limits.memory:
                self._verdict = f"stopped at more than {limits.memory / 2**20:.0f} MiB of memory"
            else:
                continue
            self._kill()
            return

    def _resident(self) -> int:
        total = 0
        with suppress(psutil.NoSuchProcess):
            self._descendants.update(self._process.children(recursive=True))
        for process in [self._process, *self._descendants]:
            with suppress(psutil.NoSuchProcess):  # it ended between listing and looking
                total += process.memory_info().rss
        return total

    def _kill(self) -> None:
        """The child, its group, and whatever of its descendants has left the group."""
        with suppress(psutil.NoSuchProcess):
            self._descendants.update(self._process.children(recursive=True))
        with suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        for _ in range(2):  # again, for what one of them may have started meanwhile
            for process in (*self._descendants, *self._strays()):
                with suppress(psutil.NoSuchProcess):
                    process.kill()

    def _strays(self) -> Iterator[psutil.Process]:
        """Processes with its mark, whoever their parent is by now."""
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):  # it has ended, or is another user's
                if self._mark in process.environ().get(MARK, ""):
                    yield process


def pauses() -> Iterator[None]:
    """Pauses between looks at what a child has done: the longer it takes, the longer they are."""
    seconds, longest = _PAUSES
    while True:
        time.sleep(seconds)
        yield
        seconds = min(seconds * 1.5, longest)


def die_with_parent() -> None:
    """In a child: end when what started it does, even if that is killed."""
    if sys.platform == "linux":
        set_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
    if os.getppid() != int(os.environ[PARENT]):
        sys.exit("the parent is gone")


def ending(code: int) -> str:
    """How a process ended, by what `Popen` says its code is."""
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:  # signals of the real-time kind have no names
        return f"killed by signal {-code}"
