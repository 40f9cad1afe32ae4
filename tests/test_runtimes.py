"""Each runtime runs its artifacts by the same names, and refuses what it cannot run."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from fuseport import ops
from fuseport.exporter import formats, runtimes
from fuseport.exporter.errors import UsageError
from fuseport.exporter.runtimes import RUNTIMES, Unsupported, _ops
from fuseport.exporter.runtimes._layouts import LAYOUTS, lay_out
from fuseport.exporter.runtimes._numpy import to_array, to_tensor
from fuseport.exporter.runtimes._torch_module import ModuleSession

# Those of files that an export writes unasked; tests/test_aot_inductor.py has the others.
DEFAULT = [name for name in RUNTIMES if runtimes.get(name).FORMAT in (None, *formats.default())]


def test_there_are_the_eight() -> None:
    assert set(RUNTIMES) >= {
        *("eager", "torchscript", "libtorch", "exported_program", "onnxruntime", "onnx_reference"),
        *("aot_inductor", "aot_inductor_cpp"),
    }
    with pytest.raises(UsageError, match="onnxruntime"):
        runtimes.get("tensorrt")


@pytest.mark.parametrize(
    ("name", "program"),
    # The model itself has no gradient program.
    [(name, "forward") for name in DEFAULT]
    + [(name, "gradient") for name in DEFAULT if runtimes.get(name).FORMAT is not None],
)
def test_outputs_have_the_names_of_the_manifest(
    name: str, program: str, lightning_bundle: Path
) -> None:
    runtime = runtimes.get(name)
    if reason := runtime.missing():  # headers or a compiler: CI has them
        pytest.skip(reason)
    manifest = json.loads((lightning_bundle / "manifest.json").read_text())
    spec: dict[str, Any] = manifest["programs"][program]
    if runtime.FORMAT is None:
        session = runtime.load(
            lightning_bundle / "weights.safetensors",
            {**spec, "architecture": manifest["architecture"], "code": None},
        )
    else:
        session = runtime.load(
            lightning_bundle / f"{program}{formats.get(runtime.FORMAT).SUFFIX}", spec
        )
    sizes = {"batch": 1, "length": 3}
    inputs: dict[str, torch.Tensor] = {}
    for entry in spec["inputs"]:
        shape = [sizes.get(dim, dim) for dim in entry["dims"]]
        is_float = "float" in entry["dtype"]
        inputs[entry["name"]] = torch.ones(shape, dtype=torch.float32 if is_float else torch.int64)
    results = session.run(inputs)
    assert set(results) == {entry["name"] for entry in spec["outputs"]}
    for entry in spec["outputs"]:
        assert str(results[entry["name"]].dtype) == f"torch.{entry['dtype']}"
    if runtime.AUTOGRAD and program == "forward":
        seeds = {"logits": torch.ones_like(results["logits"])}
        gradients = session.differentiate(inputs, seeds)  # type: ignore[attr-defined]
        expected = {entry["name"] for entry in manifest["programs"]["gradient"]["outputs"]}
        assert set(gradients) == expected


def onnx_file(path: Path, op: str, dtype: int = TensorProto.FLOAT, domain: str = "") -> Path:
    node = helper.make_node(op, ["x"], ["y"], name="node", domain=domain)
    value = [helper.make_tensor_value_info(n, dtype, ["n"]) for n in ("x", "y")]
    opsets = [helper.make_opsetid("", 20), *([helper.make_opsetid(domain, 1)] if domain else [])]
    graph = helper.make_graph([node], "g", value[:1], value[1:])
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


class TestOnnxRuntime:
    def test_a_missing_kernel_is_unsupported(self, tmp_path: Path) -> None:
        runtime = runtimes.get("onnxruntime")
        file = onnx_file(tmp_path / "m.onnx", "Neg", TensorProto.BFLOAT16)
        with pytest.raises(Unsupported, match=r"no kernel: .* of bfloat16: .* --dtype float32"):
            runtime.load(file, {})

    def test_an_unknown_op_or_random_bytes_raise(self, tmp_path: Path) -> None:
        runtime = runtimes.get("onnxruntime")
        (tmp_path / "bytes.onnx").write_bytes(bytes(range(256)))
        unknown = onnx_file(tmp_path / "m.onnx", "Fused", domain="nobody")
        for file in (tmp_path / "bytes.onnx", unknown):
            with pytest.raises(Exception, match=r"nobody|Fused|parsing"):
                runtime.load(file, {})

    def test_the_provider_that_runs_is_the_one_that_is_reported(self, tmp_path: Path) -> None:
        from fuseport.exporter.runtimes import onnxruntime

        assert onnxruntime.DEVICES["cpu"] == "CPUExecutionProvider"
        session = onnxruntime.load(onnx_file(tmp_path / "m.onnx", "Sin"), {})
        assert session._session.get_providers()[0] == onnxruntime.DEVICES["cpu"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_arrays_and_back_keep_every_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (100 * torch.randn(shape)).to(dtype)
    array = to_array(tensor)
    assert array.shape == shape
    assert array.dtype == (ml_dtypes.bfloat16 if dtype == torch.bfloat16 else array.dtype)
    back = to_tensor(array)
    assert back.dtype == dtype
    assert torch.equal(back, tensor)


def test_an_array_that_is_handed_back_is_not_the_runtimes_own() -> None:
    array = np.zeros(3, dtype=np.float32)
    tensor = to_tensor(array)
    array[:] = 1
    assert not tensor.any()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (5,), (3, 4), (2, 3, 4), (2, 0, 3)])
def test_layouts_change_strides_and_no_value(layout: str, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape)
    if layout == "expanded" and tensor.dim() > 1 and tensor.numel():
        tensor = tensor[(0,) * (tensor.dim() - 1)].expand(shape).contiguous()
    before = tensor.clone()
    laid = lay_out(tensor, layout)
    assert laid.shape == tensor.shape
    assert torch.equal(laid, before)
    if min(shape, default=0) > 1 and len(shape) > 1:
        assert laid.is_contiguous() is (layout == "contiguous")


class TestModuleSession:
    def test_gradients_of_what_does_not_enter_are_none(self) -> None:
        linear = torch.nn.Linear(3, 2)
        session = ModuleSession(
            lambda x, y: linear(x).detach() + x[:, :2],
            linear.named_parameters(),
            lambda result: {"out": result},
        )
        inputs = {"x": torch.randn(4, 3), "y": torch.randn(2)}
        results = session.differentiate(inputs, {"out": torch.ones(4, 2)})
        assert results["grad/x"] is not None
        for name in ("grad/y", "grad/weight", "grad/bias"):
            assert results[name] is None

    def test_nothing_to_differentiate_is_none_throughout(self) -> None:
        session = ModuleSession(lambda x: x > 0, [], lambda result: {"out": result})
        results = session.differentiate({"x": torch.randn(3)}, {})
        assert results["grad/x"] is None

    def test_a_missing_output_is_left_out_not_raised(self) -> None:
        session = ModuleSession(lambda x: 2 * x, [], lambda result: {"other": result})
        assert "out" not in session.differentiate({"x": torch.ones(1)}, {"out": torch.ones(1)})

    def test_inputs_keep_their_strides_and_are_not_marked(self) -> None:
        seen: list[tuple[int, ...]] = []

        def call(x: torch.Tensor) -> torch.Tensor:
            seen.append(x.stride())
            return 2 * x

        x = lay_out(torch.randn(3, 4), "transposed")
        session = ModuleSession(call, [], lambda result: {"out": result})
        session.differentiate({"x": x}, {"out": torch.ones(3, 4)})
        session.run({"x": x})
        assert seen == [x.stride()] * 2
        assert not x.requires_grad


def test_a_program_without_fused_ops_has_none_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(ops, "register", lambda *names: asked.append(names))
    for name in RUNTIMES:
        if prepare := getattr(runtimes.get(name), "prepare", None):
            prepare({"ops": []})
    assert not asked
    _ops.register({"ops": ["fuseport::swiglu"]})
    assert asked == [("fuseport::swiglu",)]
