"""The model itself, built again from the bundle, with the fused ops."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fuseport.exporter import models
from fuseport.exporter.program import named_outputs
from fuseport.exporter.runtimes._torch_module import ModuleSession

__all__ = ["AUTOGRAD", "FORMAT", "load", "missing"]

FORMAT = None
AUTOGRAD = True


def missing() -> str | None:
    """Nothing can be missing: torch is what fuseport is built on."""
    return None


def load(artifact: Path, program: Mapping[str, Any]) -> ModuleSession:
    """The model of a bundle; `artifact` is its weights."""
    model = models.rebuild(program["architecture"], artifact, code=program.get("code"))

    def call(*inputs: Tensor) -> Any:
        with model.fused():
            return model.module(*inputs)

    return ModuleSession(
        call, model.module.named_parameters(), lambda result: named_outputs(result, model.outputs)
    )
