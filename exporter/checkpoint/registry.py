"""The layouts there are, found by the files that hold them, and what each is told by.

A layout of files that torch.save wrote is a module of `files`; one of folders, of `folders`. The
module's name is the layout's. It has `SIGNS` and `recognise`.
"""

import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

from fuseport.exporter.checkpoint import files, folders
from fuseport.exporter.checkpoint.content import Content, show

__all__ = ["FILES", "FOLDERS", "FileLayout", "FolderLayout", "nearest"]


class FileLayout(Protocol):
    """A layout of what torch.save wrote."""

    SIGNS: tuple[str, ...]
    """Top-level keys that a file of this layout has. Layouts of more signs are asked first."""

    def recognise(self, path: Path, loaded: Mapping[Any, Any]) -> Content | None:
        """What the file holds; None where the layout is another."""


class FolderLayout(Protocol):
    """A layout of folders."""

    SIGNS: tuple[str, ...]
    """Files that such a folder has; `a|b` for one or the other."""

    def recognise(self, folder: Path) -> tuple[Content, list[Path]] | None:
        """What the folder holds, and the files that were read; None where it is another layout."""


def nearest(layouts: Mapping[str, FileLayout | FolderLayout], present: Iterable[str]) -> str:
    """What was looked for, and which layout comes nearest to the keys or files that are there."""
    there = set(present)
    best, found = "nothing of them is there", 0.0
    for name, layout in layouts.items():
        has = [sign for sign in layout.SIGNS if there & set(sign.split("|"))]
        if layout.SIGNS and len(has) / len(layout.SIGNS) > found:
            found = len(has) / len(layout.SIGNS)
            lacks = [sign.replace("|", " or ") for sign in layout.SIGNS if sign not in has]
            best = f"nearest is {name}: it has {_list(has)}"
            best += f", it lacks {_list(lacks)}" if lacks else ""
    return f"looked for {', '.join(layouts)}; {best}"


def _list(names: list[str]) -> str:
    return ", ".join(show(name, 150) for name in names)


def _modules(package: Any) -> dict[str, Any]:
    names = [module.name for module in pkgutil.iter_modules(package.__path__)]
    found = {name: importlib.import_module(f"{package.__name__}.{name}") for name in names}
    return dict(sorted(found.items(), key=lambda item: -len(item[1].SIGNS)))


FILES = cast(dict[str, FileLayout], _modules(files))
"""By name, those with more signs first."""

FOLDERS = cast(dict[str, FolderLayout], _modules(folders))
"""By name, those with more signs first."""
