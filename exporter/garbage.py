"""When Python looks for garbage in a process that is fuseport's own.

A full collection looks at all objects there are. torch and what it imports are half a million, and
an export makes and drops as many again: left to itself, Python spends a tenth of an export on them.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["importing"]

_OBJECTS = 50_000  # made and not dropped between two collections; Python's own number is 700


@contextmanager
def importing() -> Iterator[None]:
    """Import within, without a collection; after it, those are rare, and leave out what is there.

    It is for commands and children: a process that is somebody else's collects as that one likes.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
    if not gc.get_freeze_count():  # else it was done before, and there is more than imports by now
        gc.freeze()
    _, *older = gc.get_threshold()
    gc.set_threshold(_OBJECTS, *older)
