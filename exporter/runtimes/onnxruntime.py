"""ONNX Runtime on the CPU: custom ops run through their function bodies."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor

from fuseport.exporter.runtimes import Unsupported
from fuseport.exporter.runtimes._numpy import to_array, to_tensor

__all__ = ["AUTOGRAD", "FORMAT", "load", "missing"]

FORMAT = "onnx"
AUTOGRAD = False
PROVIDER = "CPUExecutionProvider"


def missing() -> str | None:
    """What to install, where the package is not there."""
    if find_spec("onnxruntime") is None:
        return "ONNX Runtime is not installed: pip install onnxruntime-gpu (or onnxruntime)"
    return None


def load(artifact: Path, program: Mapping[str, Any]) -> "_Session":
    """A session on an `.onnx` file.

    Raises:
        Unsupported: ONNX Runtime has no kernel for an operator and dtype in it.
    """
    return _Session(artifact)


class _Session:
    def __init__(self, artifact: Path) -> None:
        import onnxruntime
        from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NoKernel

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        try:
            self._session = onnxruntime.InferenceSession(
                str(artifact), options, providers=[PROVIDER]
            )
        except NoKernel as error:
            raise Unsupported(f"no kernel: {str(error).splitlines()[0]}") from error
        # ONNX Runtime falls back to another provider with no more than a warning.
        providers = self._session.get_providers()
        if providers[0] != PROVIDER:
            raise RuntimeError(f"asked for {PROVIDER}, running on {providers[0]}")
        self._outputs = [output.name for output in self._session.get_outputs()]

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        from onnxruntime.capi.onnxruntime_pybind11_state import RuntimeException

        feed = {name: to_array(tensor) for name, tensor in inputs.items()}
        try:
            results = self._session.run(None, feed)
        except RuntimeException as error:
            # Some kernels refuse a dtype only when they run.
            if "data type is not supported" in str(error):
                raise Unsupported(f"no kernel: {str(error).splitlines()[0]}") from error
            raise
        return {n: to_tensor(r) for n, r in zip(self._outputs, results, strict=True)}
