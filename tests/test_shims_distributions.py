"""Code that asks for the version of a package hears that of its stand-in."""

import importlib.metadata
import sys
from pathlib import Path

import pytest

from fuseport.exporter import shims

# As InternImage's dcnv3_func.py begins.
ASKS = """
import DCNv3
import pkg_resources

version = float(pkg_resources.get_distribution("DCNv3").version)
"""

# pip has the real one with it, which setuptools has no more.
REAL = "from pip._vendor.pkg_resources import *\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "asks_dcnv3.py").write_text(ASKS)
    for name in ("asks_dcnv3", "pkg_resources"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path
    for name in ("asks_dcnv3", "pkg_resources"):
        sys.modules.pop(name, None)


def test_metadata_has_the_version_of_a_stand_in():
    with shims.installed("auto"):
        assert importlib.metadata.version("DCNv3") == "1.1"
        listed = [found.metadata["Name"] for found in importlib.metadata.distributions()]
        assert "DCNv3" in listed
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("DCNv3")


@pytest.mark.parametrize("name", ["mamba_ssm", "flash_attn"])
def test_metadata_has_no_version_of_the_others(name):
    with shims.installed("auto"), pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version(name)


def test_metadata_has_it_where_the_stand_in_is_named_alone():
    with shims.installed("mamba_ssm"), pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("DCNv3")
    with shims.installed("DCNv3"):
        assert importlib.metadata.version("dcnv3") == "1.1"


def test_a_pkg_resources_that_is_there_knows_the_version(folder: Path):
    (folder / "pkg_resources.py").write_text(REAL)
    with shims.installed("auto") as used:
        import asks_dcnv3
    import pkg_resources

    assert asks_dcnv3.version == 1.1
    assert "pkg_resources" not in used
    with pytest.raises(pkg_resources.DistributionNotFound):
        pkg_resources.get_distribution("DCNv3")
    # It stays imported, and knows it the next time, too.
    with shims.installed("auto"):
        assert pkg_resources.get_distribution("DCNv3").version == "1.1"


def test_where_there_is_no_pkg_resources_a_stand_in_knows_the_version(folder: Path):
    with shims.installed("pkg_resources,DCNv3") as used:
        import asks_dcnv3
    assert asks_dcnv3.version == 1.1
    assert {"pkg_resources", "DCNv3"} <= set(used)


def test_the_stand_in_of_pkg_resources():
    with shims.installed("pkg_resources"):
        import pkg_resources
    numpy = importlib.metadata.version("numpy")
    assert pkg_resources.get_distribution("numpy").version == numpy
    (found,) = pkg_resources.require("numpy>=1")
    assert found.parsed_version == pkg_resources.parse_version(numpy)
    assert (found.project_name, found.key) == ("numpy", "numpy")
    assert pkg_resources.parse_version("1.10") > pkg_resources.parse_version("1.9")
    with pytest.raises(pkg_resources.VersionConflict, match=r"numpy .* is not numpy<1"):
        pkg_resources.require("numpy<1")
    with pytest.raises(pkg_resources.DistributionNotFound, match="not_there"):
        pkg_resources.get_distribution("not_there")
    path = pkg_resources.resource_filename("numpy", "__init__.py")
    assert Path(path).read_text().startswith('"""\nNumPy')
    with pytest.raises(NotImplementedError, match=r"iter_entry_points: .* setuptools<82"):
        pkg_resources.iter_entry_points("console_scripts")
