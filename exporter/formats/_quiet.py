"""Writers of torch's without what they say of themselves."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["quiet"]


@contextmanager
def quiet(*loggers: str) -> Iterator[None]:
    """Without warnings, and without what these loggers say but for errors.

    Packages that are not installed, deprecations of the writer's own, guesses at empty lists.
    """
    found = [logging.getLogger(name) for name in loggers]
    levels = [logger.level for logger in found]
    try:
        for logger in found:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(found, levels, strict=True):
            logger.setLevel(level)
