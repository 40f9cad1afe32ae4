"""Stands in for `pkg_resources`, which setuptools has no more from version 82 on.

Model code asks it for versions and for files beside its own.
"""

import importlib.metadata
import importlib.resources
from typing import Any

from packaging.requirements import Requirement
from packaging.version import parse as parse_version

from fuseport.exporter.shims._placeholder import refusing

__all__ = [
    "DistributionNotFound",
    "VersionConflict",
    "get_distribution",
    "parse_version",
    "require",
    "resource_filename",
]


class ResolutionError(Exception):
    """A package that is asked for is not there as it is wanted."""


class DistributionNotFound(ResolutionError):
    """It is not installed."""


class VersionConflict(ResolutionError):
    """It is installed in another version."""


class Distribution:
    """A package that is installed.

    Attributes:
        project_name: its own.
        key: the same in small letters.
        version: of it.
        parsed_version: one that can be compared.
    """

    def __init__(self, found: importlib.metadata.Distribution) -> None:
        self.project_name = found.metadata["Name"]
        self.key = self.project_name.lower()
        self.version = found.version
        self.parsed_version = parse_version(found.version)


def get_distribution(dist: str) -> Distribution:
    """A package by its name, with or without the versions that are wanted: `numpy>=1.26`.

    Raises:
        DistributionNotFound: it is not installed.
        VersionConflict: it is, in another version.
    """
    wanted = Requirement(dist)
    try:
        found = Distribution(importlib.metadata.distribution(wanted.name))
    except importlib.metadata.PackageNotFoundError as error:
        raise DistributionNotFound(
            f"The {dist!r} distribution was not found and is required by the application"
        ) from error
    if not wanted.specifier.contains(found.version, prereleases=True):
        raise VersionConflict(f"{found.project_name} {found.version} is not {dist}")
    return found


def require(*requirements: str) -> list[Distribution]:
    """The same of several; what these want themselves is not looked at."""
    return [get_distribution(requirement) for requirement in requirements]


def resource_filename(package_or_requirement: str, resource_name: str) -> str:
    """The path of a file in the folder of a package that is imported from files."""
    return str(importlib.resources.files(package_or_requirement).joinpath(resource_name))


def __getattr__(name: str) -> Any:
    return refusing(
        __name__,
        name,
        f"pkg_resources.{name}: fuseport's stand-in has versions and files of packages alone; "
        "install setuptools<82",
    )
