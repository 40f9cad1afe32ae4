"""A `.pt2` file, loaded by torch.export and run as the module it unlifts to."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.export.passes import move_to_device_pass

from fuseport.exporter.program import named_outputs
from fuseport.exporter.runtimes._device import OF_TORCH, device_of
from fuseport.exporter.runtimes._ops import prepare, register
from fuseport.exporter.runtimes._torch_module import ModuleSession

__all__ = ["AUTOGRAD", "DEVICES", "FORMAT", "load", "missing", "prepare"]

FORMAT = "exported_program"
AUTOGRAD = True
DEVICES = OF_TORCH


def missing() -> str | None:
    """Nothing can be missing: it is part of torch."""
    return None


def load(artifact: Path, program: Mapping[str, Any]) -> ModuleSession:
    """A session on a `.pt2` file."""
    register(program)
    loaded, device = torch.export.load(artifact), device_of(program)
    if device.type != "cpu":
        loaded = move_to_device_pass(loaded, device)
    module = loaded.module()
    names = [spec["name"] for spec in program["outputs"]]
    return ModuleSession(
        module, module.named_parameters(), lambda result: named_outputs(result, names), device
    )
