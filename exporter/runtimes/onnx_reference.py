"""onnx's own reference evaluator: slow, in numpy, the plainest reading of the standard."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor

from fuseport.exporter.runtimes import Unsupported
from fuseport.exporter.runtimes._numpy import to_array, to_tensor
from fuseport.exporter.runtimes._onnx_operators import operators, typed_when_run

__all__ = ["AUTOGRAD", "FORMAT", "load", "missing"]

FORMAT = "onnx"
AUTOGRAD = False


def missing() -> str | None:
    """What to install, where the package is not there."""
    return None if find_spec("onnx") else "onnx is not installed: pip install onnx"


def load(artifact: Path, program: Mapping[str, Any]) -> "_Session":
    """A session on an `.onnx` file."""
    return _Session(artifact)


class _Session:
    def __init__(self, artifact: Path) -> None:
        import onnx
        from onnx.reference import ReferenceEvaluator

        model = onnx.load(artifact)
        opset = next(o.version for o in model.opset_import if not o.domain)
        try:
            self._evaluator = ReferenceEvaluator(typed_when_run(model), new_ops=operators(opset))
        except NotImplementedError as error:
            raise Unsupported(str(error).splitlines()[0]) from error

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        feed = {name: to_array(tensor) for name, tensor in inputs.items()}
        results = self._evaluator.run(None, feed)
        names = self._evaluator.output_names
        return {n: to_tensor(r) for n, r in zip(names, results, strict=True)}
