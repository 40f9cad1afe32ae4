"""AOTInductor packages in Python."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fuseport.exporter.program import named_outputs
from fuseport.exporter.runtimes._aot_inductor import WRITABLE, check, contiguous
from fuseport.exporter.runtimes._device import OF_TORCH, device_of
from fuseport.exporter.runtimes._ops import prepare, register

__all__ = ["AUTOGRAD", "DEVICES", "FORMAT", "WRITABLE", "load", "missing", "prepare"]

FORMAT = "aot_inductor"
AUTOGRAD = False
DEVICES = OF_TORCH


def missing() -> str | None:
    """Nothing can be missing: it is part of torch."""
    return None


def load(artifact: Path, program: Mapping[str, Any]) -> "_Session":
    """A session on an `.aoti.pt2` file.

    Raises:
        Unsupported: it was compiled for another machine, device or version of torch.
    """
    check(artifact, program.get("device", "cpu"))
    register(program)
    return _Session(artifact, [spec["name"] for spec in program["outputs"]], device_of(program))


class _Session:
    def __init__(self, artifact: Path, outputs: list[str], device: torch.device) -> None:
        from torch._inductor import aoti_load_package

        self.device = device
        self._package = aoti_load_package(str(artifact))
        self._outputs = outputs

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The program's outputs by name."""
        with torch.no_grad():
            return named_outputs(self._package(*contiguous(inputs).values()), self._outputs)
