"""Maps the repository root onto the package `fuseport`; all metadata is in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

NAME = "fuseport"
ROOTS = ("exporter", "ops")


class BuildPy(build_py):
    """Adds the root's `py.typed`: package data go with packages, and the root is not listed."""

    def run(self) -> None:
        """Copy the package's files to the build folder; an editable install has none."""
        super().run()
        if not self.editable_mode:
            self.copy_file("py.typed", str(Path(self.build_lib, NAME, "py.typed")))


setup(
    cmdclass={"build_py": BuildPy},
    packages=[f"{NAME}.{root}" for root in ROOTS]
    + [f"{NAME}.{root}.{package}" for root in ROOTS for package in find_packages(root)],
    # `fuseport` itself is not listed as a package: that would put setup.py into the wheel.
    py_modules=[f"{NAME}.{module}" for module in ("__init__", "__main__", "cli")],
    package_dir={NAME: ".", **{f"{NAME}.{root}": root for root in ROOTS}},
    # `native`, `host`, `page` and `_toolkit` are no packages, since there is no Python in them.
    package_data={
        "": ["*.cpp", "*.hpp", "*.h", "*.cu", "*.cuh"],
        f"{NAME}.exporter.runtimes": ["host/**"],
        f"{NAME}.exporter.shims": ["_toolkit/**"],
        f"{NAME}.exporter.verify.report": ["page/**"],
        f"{NAME}.ops": ["native/**"],
    },
)
