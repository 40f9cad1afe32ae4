"""ONNX Runtime on the CPU: custom ops run through their function bodies."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fuseport.exporter.runtimes._onnxruntime import PROVIDER, OnnxRuntimeSession, missing

__all__ = ["AUTOGRAD", "FORMAT", "OPTIMISES", "PROVIDER", "load", "missing"]

FORMAT = "onnx"
AUTOGRAD = False
OPTIMISES = True


def load(artifact: Path, program: Mapping[str, Any]) -> OnnxRuntimeSession:
    """A session on an `.onnx` file; see `OnnxRuntimeSession`."""
    return OnnxRuntimeSession(artifact, optimised=program.get("optimised", True))
