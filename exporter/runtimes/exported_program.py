"""A `.pt2` file, loaded by torch.export and run as the module it unlifts to."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fuseport.exporter.program import named_outputs
from fuseport.exporter.runtimes._ops import prepare, register
from fuseport.exporter.runtimes._torch_module import ModuleSession

__all__ = ["AUTOGRAD", "FORMAT", "load", "missing", "prepare"]

FORMAT = "exported_program"
AUTOGRAD = True


def missing() -> str | None:
    """Nothing can be missing: it is part of torch."""
    return None


def load(artifact: Path, program: Mapping[str, Any]) -> ModuleSession:
    """A session on a `.pt2` file."""
    register(program)
    module = torch.export.load(artifact).module()
    names = [spec["name"] for spec in program["outputs"]]
    return ModuleSession(
        module, module.named_parameters(), lambda result: named_outputs(result, names)
    )
