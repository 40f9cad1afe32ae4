"""Packages that code hears are installed, where it asks for the version of one with a stand-in.

InternImage's files for DCNv3, and what others have copied of them, ask as they are imported:
`importlib.metadata`, or `pkg_resources`, which setuptools had until version 82.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from types import ModuleType
from typing import Any

from fuseport.exporter.shims._patching import patching

__all__ = ["ASKED", "VERSIONS", "distributions", "heard", "watched"]

VERSIONS: Mapping[str, str] = {"DCNv3": "1.1"}
"""Of stand-ins of which code asks it: the first version that does all that the stand-in does."""

ASKED = "pkg_resources"
"""What keeps a list of its own of what is installed."""


class _StandIn(Distribution):
    """The little that is known of a package that is not there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        return f"Metadata-Version: 2.1\nName: {self._name}\nVersion: {VERSIONS[self._name]}\n"

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"{path}: {self._name} is fuseport's stand-in, and has no files")


def distributions(
    context: DistributionFinder.Context, serves: Callable[[str], bool]
) -> Iterator[Distribution]:
    """Those that `importlib.metadata` asks for.

    Args:
        context: with the name of one, or without.
        serves: whether a stand-in is on the import path.
    """
    for name in VERSIONS:
        if context.name in (None, name, name.lower()) and serves(name):
            yield _StandIn(name)


@contextmanager
def heard(serves: Callable[[str], bool]) -> Iterator[None]:
    """Within, a `pkg_resources` that has been imported knows them, too.

    Args:
        serves: as for `distributions`.
    """
    _add(sys.modules.get(ASKED), serves)
    try:
        yield
    finally:
        _remove(sys.modules.get(ASKED))


def watched(spec: ModuleSpec | None, serves: Callable[[str], bool]) -> ModuleSpec | None:
    """How `pkg_resources` is imported so that it knows them.

    Args:
        spec: how it is imported otherwise; None where it is not there.
        serves: as for `distributions`.
    """
    return patching(spec, lambda module: _add(module, serves))


def _known(module: ModuleType | None) -> dict[str, Any]:
    """What `pkg_resources` knows, to be changed; nothing where it is not, or of its stand-in."""
    known = None if module is None else vars(module).get("working_set")
    return {} if known is None else known.by_key


def _add(module: Any, serves: Callable[[str], bool]) -> None:
    known = _known(module)
    for name, version in VERSIONS.items() if known else ():
        if serves(name):
            found = module.Distribution(project_name=name, version=version)
            known.setdefault(found.key, found)


def _remove(module: ModuleType | None) -> None:
    known = _known(module)
    for name in VERSIONS:
        if name.lower() in known and known[name.lower()].location is None:
            del known[name.lower()]
