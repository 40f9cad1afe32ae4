"""What both runtimes of AOTInductor packages need to know before they open one."""

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from packaging.version import Version
from torch import Tensor

from fuseport.exporter.bundle import machine
from fuseport.exporter.formats.aot_inductor import BOUND
from fuseport.exporter.runtimes import Unsupported

__all__ = ["WRITABLE", "check", "contiguous"]

WRITABLE = () if Version(torch.__version__) >= Version("2.13") else (Path("/tmp"),)
"""Where torch unpacks a package, beside the folders that TMPDIR names: older ones always there."""


def check(artifact: Path, device: str | None) -> str:
    """Look into a package without running anything of it.

    Args:
        artifact: the file.
        device: that it is to be run on; None for that which it was compiled for.

    Returns:
        The device.

    Raises:
        Unsupported: it was compiled for another machine or version of torch, or for another device
            than it is to be run on.
        ValueError: it is no package.
    """
    try:
        with zipfile.ZipFile(artifact) as package:
            names = package.namelist()
            found = [n for n in names if n.endswith("_metadata.json")]
            said = [json.loads(package.read(name)) for name in found]
    except (zipfile.BadZipFile, ValueError, KeyError) as error:
        raise ValueError(f"no AOTInductor package: {error}") from error
    if any(name.startswith("/") or ".." in Path(name).parts for name in names):
        raise ValueError("no AOTInductor package: a member of it points outside of it")
    for bound in (json.loads(metadata[BOUND]) for metadata in said if BOUND in metadata):
        compiled = str(bound.get("device", "cpu"))
        if compiled != (device or compiled):
            raise Unsupported(
                f"compiled for {compiled}, not {device}; export it with --format aot_inductor "
                f"--device {device}, or run it with --device {compiled}"
            )
        if reason := machine.unlike(bound):
            raise Unsupported(f"{reason}; export it here with --format aot_inductor")
        device = compiled
    return device or "cpu"


def contiguous(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Inputs as the compiled code takes them: it knows their strides, and does not look."""
    return {name: tensor.contiguous() for name, tensor in inputs.items()}
