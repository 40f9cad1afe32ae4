"""Every error that a user is meant to read, with the exit code it ends the command with.

A message is one line: it names the file, the member in it, the reason, and what to do.
"""

from collections.abc import Sequence

__all__ = [
    "CorruptInput",
    "ExportFailed",
    "FuseportError",
    "Missing",
    "RuntimeCrash",
    "StorageError",
    "UnsafeInput",
    "UsageError",
]


class FuseportError(Exception):
    """Base of all errors that end a command with one plain line.

    `details` are findings that belong to it, a line each.
    """

    exit_code = 1

    def __init__(self, message: str, details: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.details = tuple(details)


class UsageError(FuseportError):
    """A missing file, an unknown format name, options that contradict each other."""

    exit_code = 2


class UnsafeInput(FuseportError):
    """Reading this would run code that came with the file."""

    exit_code = 3


class CorruptInput(FuseportError):
    """The input cannot be read, or is not what its bytes or its manifest claim."""

    exit_code = 4


class Missing(FuseportError):
    """Something needed is absent or of the wrong version, or the architecture does not fit."""

    exit_code = 5


class RuntimeCrash(FuseportError):
    """A runtime died, ran out of time or out of memory."""

    exit_code = 6


class StorageError(FuseportError):
    """Reading or writing failed."""

    exit_code = 7


class ExportFailed(FuseportError):
    """A program could not be captured, or not be written in a format."""

    exit_code = 8
