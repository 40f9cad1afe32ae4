"""AOTInductor packages in C++: a program without Python opens them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fuseport.exporter.runtimes import _host
from fuseport.exporter.runtimes._aot_inductor import WRITABLE, check, contiguous
from fuseport.exporter.runtimes._device import OF_TORCH
from fuseport.exporter.runtimes._host import prepare

__all__ = ["AUTOGRAD", "DEVICES", "FORMAT", "WRITABLE", "load", "missing", "prepare"]

FORMAT = "aot_inductor"
AUTOGRAD = False
DEVICES = OF_TORCH


def missing() -> str | None:
    """What to install, where the program cannot be built."""
    return _host.missing()


def load(artifact: Path, program: Mapping[str, Any]) -> "_Session":
    """A session on an `.aoti.pt2` file, with the ops' libraries as in the runtime `libtorch`.

    Raises:
        Unsupported: it was compiled for another machine, device or version of torch.
    """
    check(artifact, program.get("device", "cpu"))
    return _Session(_host.HostSession(FORMAT, artifact, program))


class _Session:
    def __init__(self, host: _host.HostSession) -> None:
        self._host = host

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The program's outputs by name."""
        return self._host.run(contiguous(inputs))
