"""onnx's own reference evaluator: slow, in numpy, the plainest reading of the standard."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fuseport.exporter.runtimes import Unsupported
from fuseport.exporter.runtimes._numpy import to_array, to_tensor

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
        from onnx.reference import ReferenceEvaluator

        try:
            self._evaluator = ReferenceEvaluator(str(artifact), new_ops=[_gather_elements()])
        except NotImplementedError as error:
            raise Unsupported(str(error).splitlines()[0]) from error

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        feed = {name: to_array(tensor) for name, tensor in inputs.items()}
        results = self._evaluator.run(None, feed)
        names = self._evaluator.output_names
        return {n: to_tensor(r) for n, r in zip(names, results, strict=True)}


def _gather_elements() -> Any:
    """The operator, which onnx 1.23 has for 64 values of an axis, and for indices of one size."""
    from onnx.reference.op_run import OpRun

    class GatherElements(OpRun):  # type: ignore[misc]  # onnx has no types
        def _run(self, data: Any, indices: Any, axis: int = 0) -> tuple[Any]:
            axis %= data.ndim
            reached = tuple(slice(None if i == axis else n) for i, n in enumerate(indices.shape))
            return (np.take_along_axis(data[reached], indices, axis),)

    return GatherElements
