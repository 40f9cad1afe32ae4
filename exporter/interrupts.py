"""SIGINT and SIGTERM end a command: for certain, and at a moment when nothing is half done."""

import itertools
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any

__all__ = ["Interrupted", "deferred", "raised", "unwrapped"]

_ENDING = (signal.SIGINT, signal.SIGTERM)
_AGAIN = signal.SIGALRM
_AGAIN_SECONDS = 1.0
_SOON_SECONDS = 0.002
_MOST_SOON = 500  # times that it waits for a context manager, which may itself wait for something
_WITHIN = 4  # calls that one makes, as the modes of torch do in Python

_ARRIVED: ContextVar[Sequence[int]] = ContextVar("_ARRIVED", default=())


class Interrupted(SystemExit):
    """A signal that ends the command: what was begun is cleaned up on its way out."""


@contextmanager
def raised() -> Iterator[None]:
    """Within, a first SIGINT or SIGTERM raises `Interrupted`, until that is through.

    Code of others may lose it: Python ignores what is raised in a finalizer or in the callback of a
    weak reference, and some libraries catch all there is. So it is raised again, each second, while
    nothing is on its way out. What is ignored stays so, as in what a shell runs in the background.

    It is not raised while a context manager is entered or left, if that does not take a second:
    what it has done would not be undone. Of a mode of torch's left so, C++ ends the process.
    """
    before = {number: signal.getsignal(number) for number in (*_ENDING, _AGAIN)}
    arrived: list[int] = []
    token = _ARRIVED.set(arrived)
    waited = itertools.count()

    def interrupted(number: int, frame: FrameType | None) -> None:
        arrived.append(number)
        interrupt(frame)

    def again(number: int, frame: FrameType | None) -> None:
        if arrived and not _leaving(sys.exception()):
            interrupt(frame)

    def interrupt(frame: FrameType | None) -> None:
        soon = _at_context(frame) and next(waited) < _MOST_SOON
        first = _SOON_SECONDS if soon else _AGAIN_SECONDS
        signal.setitimer(signal.ITIMER_REAL, first, _AGAIN_SECONDS)
        if not soon:
            raise Interrupted(128 + arrived[0])

    try:
        signal.signal(_AGAIN, again)
        for number in _ENDING:
            if before[number] in (signal.SIG_DFL, signal.default_int_handler):
                signal.signal(number, interrupted)
        yield
    except SystemExit as end:
        if arrived and not isinstance(end, Interrupted):  # it was lost, and the command went on
            raise Interrupted(128 + arrived[0]) from None
        raise
    finally:
        if arrived:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        _set(before)
        _ARRIVED.reset(token)


@contextmanager
def unwrapped() -> Iterator[None]:
    """Within, an error that an interrupt was made into is that interrupt again.

    Python makes another of what is raised while a class is put together, as do libraries. Some, as
    torch where it asks what it is given for its length, make one that knows nothing of the first:
    within `raised`, any error after a signal is the interrupt.
    """
    try:
        yield
    except Exception as error:
        for found in _chain(error):
            if isinstance(found, Interrupted):
                raise found from None
        if arrived := _ARRIVED.get():
            raise Interrupted(128 + arrived[0]) from None
        raise


def _leaving(error: BaseException | None) -> bool:
    """Whether what runs now cleans up, after an interrupt or where a generator is closed."""
    return any(isinstance(e, Interrupted | GeneratorExit) for e in _chain(error))


def _at_context(frame: FrameType | None) -> bool:
    """Whether a context manager is being entered or left."""
    theirs = (f for f in _callers(frame) if f.f_code.co_filename != __file__)
    innermost = itertools.islice(theirs, _WITHIN)
    return any(f.f_code.co_name in ("__enter__", "__exit__") for f in innermost)


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and those while which it was raised."""
    while error is not None:
        yield error
        error = error.__context__


@contextmanager
def deferred() -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Within, handlers of Python wait for the end: they raise, and could do so between any two
    steps, as that which makes a folder and that which remembers that it is to be removed.

    A signal that is ignored, or ends the process at once, is left as it is. In a thread other than
    the main one nothing is done, since handlers run in that one alone.

    Yields:
        A context manager within which they do not wait.
    """
    if threading.current_thread() is not threading.main_thread():
        yield _nothing
        return
    handlers = {n: h for n in (*_ENDING, _AGAIN) if callable(h := signal.getsignal(n))}
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    @contextmanager
    def lifted() -> Iterator[None]:
        _restore(handlers, arrived)
        try:
            yield
        finally:
            _set(dict.fromkeys(handlers, note))

    try:
        _set(dict.fromkeys(handlers, note))
        yield lifted
    finally:
        _restore(handlers, arrived)


def _restore(handlers: dict[signal.Signals, Any], arrived: list[int]) -> None:
    """Have the handlers back, and call those whose signals came meanwhile."""
    _set(handlers)
    waiting = list(dict.fromkeys(arrived))
    arrived.clear()
    for number in waiting:
        handlers[signal.Signals(number)](number, None)


def _set(handlers: dict[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


@contextmanager
def _nothing() -> Iterator[None]:
    yield
