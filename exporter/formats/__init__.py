"""Program → artifact. One file is one format, and the file's name is the format's.

A format has `SUFFIX`, `DEFAULT` and `write(program, path, options)`, which raises ExportFailed for
what it cannot say. Modules with a leading underscore are parts of formats.
"""

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from fuseport.exporter.errors import UsageError
from fuseport.exporter.program import Program

__all__ = [
    "DEFAULT_OPSET",
    "FORMATS",
    "OPSETS",
    "Format",
    "Options",
    "compiled",
    "default",
    "get",
    "of_file",
    "redundant",
]

OPSETS = range(18, 24)
DEFAULT_OPSET = 20

FORMATS = tuple(
    module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")
)
"""The names of all formats."""


@dataclass(frozen=True)
class Options:
    """What formats may need beside the program.

    Attributes:
        weights: the bundle's `weights.safetensors`, in the folder that the artifact is written to.
        opset: of ONNX's standard operators, one of `OPSETS`.
        device: that machine code is compiled for, `cpu` or `cuda`.
    """

    weights: Path
    opset: int = DEFAULT_OPSET
    device: str = "cpu"


class Format(Protocol):
    """What a module here implements.

    A module may have `COMPILED`, true if its files are machine code for one device; those of the
    others serve any. One whose file can be no more than another format's has `redundant(path,
    facts)`: why a file that it wrote is so in its folder, None if it is not.
    """

    SUFFIX: str
    """Of its files; a longer one that fits goes before a shorter one."""

    DEFAULT: bool
    """Whether an export writes it unasked."""

    def write(self, program: Program, path: Path, options: Options) -> Mapping[str, Any]:
        """Write `program` to a new file at `path`; says what the manifest notes of it."""


def default() -> tuple[str, ...]:
    """The names of the formats that an export writes unasked."""
    return tuple(name for name in FORMATS if get(name).DEFAULT)


def compiled(name: str) -> bool:
    """Whether a format's files are machine code for one device."""
    return bool(getattr(get(name), "COMPILED", False))


def redundant(name: str, path: Path, facts: Mapping[str, Any]) -> str | None:
    """Why a file of a format is no more than another in its folder; None if it is more.

    Args:
        name: of the format.
        path: of the file.
        facts: what `write` said of it.
    """
    look = getattr(get(name), "redundant", None)
    return look(path, facts) if look else None


def get(name: str) -> Format:
    """The format of that name.

    Raises:
        UsageError: there is none.
    """
    if name not in FORMATS:
        raise UsageError(f"{name} is not a format; there are: {', '.join(FORMATS)}")
    return cast(Format, importlib.import_module(f"{__name__}.{name}"))


def of_file(name: str) -> str:
    """The format of a file of that name.

    Raises:
        UsageError: no format has its suffix.
    """
    suffixes = {get(format_name).SUFFIX: format_name for format_name in FORMATS}
    for suffix in sorted(suffixes, key=len, reverse=True):
        if name.endswith(suffix):
            return suffixes[suffix]
    raise UsageError(f"{name}: no format has its suffix; there are {', '.join(suffixes)}")
