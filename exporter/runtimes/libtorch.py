"""TorchScript in C++ libtorch: a program without Python, which opens the ops' libraries itself."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fuseport.exporter.runtimes import _host
from fuseport.exporter.runtimes._device import OF_TORCH
from fuseport.exporter.runtimes._host import HostSession, prepare

__all__ = ["AUTOGRAD", "DEVICES", "FORMAT", "load", "missing", "prepare"]

FORMAT = "torchscript"
AUTOGRAD = True
DEVICES = OF_TORCH


def missing() -> str | None:
    """What to install, where the program cannot be built."""
    return _host.missing()


def load(artifact: Path, program: Mapping[str, Any]) -> HostSession:
    """A session on a `.pt` file, with the libraries of ops that `libraries.find` finds."""
    return HostSession(FORMAT, artifact, program)
