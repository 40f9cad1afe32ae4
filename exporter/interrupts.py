"""SIGINT and SIGTERM that wait for a moment when nothing is half done."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

__all__ = ["Interrupted", "deferred"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(SystemExit):
    """A signal that ends the command: what was begun is cleaned up on its way out."""


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
    handlers = {n: h for n in _SIGNALS if callable(h := signal.getsignal(n))}
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
