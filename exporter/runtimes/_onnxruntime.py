"""A session of ONNX Runtime."""

import ctypes
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fuseport.exporter.runtimes import Unsupported
from fuseport.exporter.runtimes._numpy import to_array, to_tensor

__all__ = ["PROVIDERS", "OnnxRuntimeSession", "from_value", "load", "missing", "to_value"]

PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
"""By device."""

# As torch's, see `_device`: float32 is float32.
_OPTIONS: dict[str, dict[str, str]] = {"CUDAExecutionProvider": {"use_tf32": "0"}}
_BFLOAT16 = 16  # in TensorProto.DataType; ONNX Runtime's arrays have no such type


def missing() -> str | None:
    """What to install, where the package is not there."""
    if find_spec("onnxruntime") is None:
        return "ONNX Runtime is not installed: pip install onnxruntime-gpu (or onnxruntime)"
    return None


def load(artifact: Path, program: Mapping[str, Any]) -> "OnnxRuntimeSession":
    """A session without a library of custom ops; see `OnnxRuntimeSession`."""
    optimised, device = program.get("optimised", True), program.get("device", "cpu")
    return OnnxRuntimeSession(artifact, optimised=optimised, device=device)


class OnnxRuntimeSession:
    """An `.onnx` file, loaded.

    Args:
        artifact: the file.
        library: of custom ops, whose kernels take the place of function bodies; None for none.
        optimised: False for the graph as it is in the file.
        device: of `PROVIDERS`.

    Raises:
        Unsupported: ONNX Runtime has no kernel for an operator and dtype in it, or would run it on
            another provider than was asked for.
    """

    def __init__(
        self,
        artifact: Path,
        library: Path | None = None,
        *,
        optimised: bool = True,
        device: str = "cpu",
    ) -> None:
        import onnxruntime
        from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NoKernel

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        if not optimised:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        if library is not None:
            options.register_custom_ops_library(str(library))
        provider = PROVIDERS[device]
        try:
            self._session = onnxruntime.InferenceSession(
                str(artifact), options, providers=[(provider, _OPTIONS.get(provider, {}))]
            )
        except NoKernel as error:
            said = str(error).splitlines()[0]
            raise Unsupported(f"no kernel: {said}{_of_types(artifact, said, device)}") from error
        # ONNX Runtime falls back to another provider with no more than a warning.
        found = self._session.get_providers()
        if found[:1] != [provider]:
            raise Unsupported(
                f"{provider} was asked for, and ONNX Runtime would run on {', '.join(found)}: "
                f"install a build of it that has {provider}"
            )
        self._outputs = [output.name for output in self._session.get_outputs()]

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The program's outputs by name.

        Raises:
            Unsupported: a kernel refuses a dtype only now that it runs.
        """
        from onnxruntime.capi.onnxruntime_pybind11_state import RuntimeException

        values = {name: to_value(tensor) for name, tensor in inputs.items()}
        try:
            results = self._session.run_with_ort_values(self._outputs, values)
        except RuntimeException as error:
            if "data type is not supported" in str(error):
                raise Unsupported(f"no kernel: {str(error).splitlines()[0]}") from error
            raise
        return {n: from_value(r) for n, r in zip(self._outputs, results, strict=True)}


def _of_types(artifact: Path, said: str, device: str) -> str:
    """Of which types the node is that ONNX Runtime names, and what to do about it.

    One without a name is in the body of an operator, as of Gelu, of which it has no kernel.
    """
    import onnx

    named = re.search(r"node with name '(.+?)'", said)
    graph = onnx.load(artifact, load_external_data=False).graph
    taken = {i for n in graph.node if named and n.name == named[1] for i in n.input}
    values = (*graph.value_info, *graph.input)
    found = {v.type.tensor_type.elem_type for v in values if v.name in taken}
    found |= {t.data_type for t in graph.initializer if t.name in taken}
    names = sorted(onnx.TensorProto.DataType.Name(t).lower() for t in found)
    advice = ": export with --dtype float32 and without autocast, or compare with --device cuda"
    is_narrow = _BFLOAT16 in found and device == "cpu"
    if not names and device == "cpu" and _has_bfloat16(graph):
        return (
            "; the file computes in bfloat16, for which there are few kernels on the CPU" + advice
        )
    return f" of {', '.join(names)}{advice if is_narrow else ''}" if names else ""


def _has_bfloat16(graph: Any) -> bool:
    return any(value.type.tensor_type.elem_type == _BFLOAT16 for value in graph.value_info)


def to_value(tensor: Tensor) -> Any:
    """An OrtValue with the tensor's values, of any dtype that ONNX Runtime has."""
    from onnxruntime import OrtValue

    array = to_array(tensor)
    if tensor.dtype != torch.bfloat16:
        return OrtValue.ortvalue_from_numpy(array)
    return OrtValue.ortvalue_from_numpy_with_onnx_type(array.view("int16"), _BFLOAT16)


def from_value(value: Any) -> Tensor:
    """A tensor of its own with the values of an OrtValue on the CPU."""
    if value.data_type() != "tensor(bfloat16)":
        return to_tensor(value.numpy())
    tensor = torch.empty(value.shape(), dtype=torch.bfloat16)
    ctypes.memmove(tensor.data_ptr(), value.data_ptr(), tensor.nbytes)
    return tensor
