"""ONNX Runtime: custom ops run through their function bodies."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fuseport.exporter.runtimes._onnxruntime import PROVIDERS, OnnxRuntimeSession, missing

__all__ = ["AUTOGRAD", "DEVICES", "FORMAT", "OPTIMISES", "load", "missing"]

FORMAT = "onnx"
AUTOGRAD = False
DEVICES = PROVIDERS
OPTIMISES = True


def load(artifact: Path, program: Mapping[str, Any]) -> OnnxRuntimeSession:
    """A session on an `.onnx` file; see `OnnxRuntimeSession`."""
    optimised, device = program.get("optimised", True), program.get("device", "cpu")
    return OnnxRuntimeSession(artifact, optimised=optimised, device=device)
