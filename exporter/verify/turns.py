"""Several runtimes at once: which is looked at when, and how many there is room for.

Their processes compute side by side; what they give is judged here, one at a time. So nothing
is shared between threads, and what ends one ends all.
"""

import os
import resource
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TypeVar

import psutil

from fuseport.exporter.child import pauses

__all__ = ["in_turns", "room", "waited"]

T = TypeVar("T")

Task = Callable[[], Generator[T | None, None, None]]
"""What gives results, and None as often as there is none yet."""

_MOST = 4  # of a small model, what is judged takes as long as that many give
_CONTAINER = Path("/sys/fs/cgroup")
_SHARE = 0.5  # of the memory that is free, which others want, too


def waited(task: Generator[T | None, None, None]) -> Generator[T, None, None]:
    """What a single one gives, waiting for it."""
    with closing(task):
        pause = pauses()
        for result in task:
            if result is None:
                next(pause)
            else:
                yield result
                pause = pauses()


def in_turns(tasks: Mapping[str, Task[T]], at_once: int) -> dict[str, list[T]]:
    """The results of each task.

    Args:
        tasks: by name, started in their order. All that run are closed if one raises, or on an
            interrupt.
        at_once: how many run; each as soon as an earlier one is through.
    """
    found: dict[str, list[T]] = {name: [] for name in tasks}
    waiting = list(tasks)
    running: dict[str, Generator[T | None, None, None]] = {}
    pause = pauses()
    with ExitStack() as stack:
        while waiting or running:
            while waiting and len(running) < at_once:
                name = waiting.pop(0)
                running[name] = stack.enter_context(closing(tasks[name]()))
            moved = [_moved(name, running, found) for name in list(running)]
            if any(moved):
                pause = pauses()
            else:
                next(pause)
    return found


def _moved(
    name: str, running: dict[str, Generator[T | None, None, None]], found: dict[str, list[T]]
) -> bool:
    """Whether a look at a task found something: a result, or its end."""
    try:
        result = next(running[name])
    except StopIteration:
        del running[name]
        return True
    if result is not None:
        found[name].append(result)
    return result is not None


def room() -> int:
    """How many runtimes of a model there is room for, once it has run in this process in float64.

    One takes less memory than that did, in the dtype of its artifact, unless it keeps what it is
    through with; so there are as many as find the most that this process has had, in half of what
    is free.
    """
    return max(1, min(_MOST, _processors(), int(_SHARE * _free() / _had())))


def _processors() -> int:
    if sys.platform == "linux":  # elsewhere no process is bound to some
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _free() -> int:
    """Bytes that are free, of the machine's and, in a container, of what that may take."""
    free = int(psutil.virtual_memory().available)
    try:
        limit, taken, details = (
            (_CONTAINER / f"memory.{name}").read_text() for name in ("max", "current", "stat")
        )
        if limit.strip() != "max":
            # Of files the system keeps pages for as long as nobody wants the room.
            files = dict(line.split() for line in details.splitlines())["file"]
            free = min(free, int(limit) - int(taken) + int(files))
    except (OSError, ValueError, KeyError):
        return free  # no cgroup of the second version
    return free


def _had() -> int:
    """The most bytes that were resident in this process."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
