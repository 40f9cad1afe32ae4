"""TorchScript in Python: the same interpreter as in C++ libtorch."""

import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fuseport.exporter.program import named_outputs
from fuseport.exporter.runtimes._device import OF_TORCH, device_of
from fuseport.exporter.runtimes._ops import prepare, register
from fuseport.exporter.runtimes._torch_module import ModuleSession

__all__ = ["AUTOGRAD", "DEVICES", "FORMAT", "OPTIMISES", "load", "missing", "prepare"]

FORMAT = "torchscript"
AUTOGRAD = True
DEVICES = OF_TORCH
OPTIMISES = True


def missing() -> str | None:
    """Nothing can be missing: it is part of torch."""
    return None


def load(artifact: Path, program: Mapping[str, Any]) -> ModuleSession:
    """A session on a `.pt` file."""
    register(program)
    device = device_of(program)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, and says so at every call
        module = torch.jit.load(str(artifact), map_location=device)
    names = [spec["name"] for spec in program["outputs"]]
    optimised = program.get("optimised", True)

    # A graph is made ready for what its first call asks for, gradients or none, and stays so.
    trained = cache(lambda: torch._C._create_function_from_graph("forward", module.graph.copy()))

    def call(*inputs: Tensor) -> Any:
        with torch.jit.optimized_execution(optimised):  # type: ignore[attr-defined]  # no __all__
            return trained()(module, *inputs) if torch.is_grad_enabled() else module(*inputs)

    return ModuleSession(
        call, module.named_parameters(), lambda result: named_outputs(result, names), device
    )
