"""The runtime onnxruntime+fused: the same `.onnx` files, by fused kernels, or it says why not."""

from collections.abc import Iterable
from pathlib import Path

import onnx
import pytest
import torch
from onnx import TensorProto, helper

from fuseport.exporter import api, runtimes
from fuseport.exporter.errors import Missing
from fuseport.exporter.runtimes import Unsupported, _onnxruntime, onnxruntime__fused
from fuseport.exporter.runtimes._onnxruntime import OnnxRuntimeSession
from fuseport.ops import cuda, ort
from fuseport.ops.build import Status
from fuseport.ops.spec import OpSpec
from fuseport.tests.ops.cuda_on_cpu import stand_in

NAME = "onnxruntime+fused"


def one_node(name: str, domain: str) -> onnx.ModelProto:
    node = helper.make_node(name, ["x"], ["y"], domain=domain)
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["n"]) for n in "xy")
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("fuseport.ops", 1)]
    return helper.make_model(helper.make_graph([node], "g", [x], [y]), opset_imports=opsets)


def test_the_name_is_the_modules_with_a_plus() -> None:
    assert NAME in runtimes.RUNTIMES
    assert runtimes.get(NAME) is onnxruntime__fused


def test_a_bundle_passes_outputs_and_gradients(fused_library: Path, lightning_bundle: Path) -> None:
    report = api.verify(lightning_bundle, runtime=[NAME])
    assert report.exit_code(strict=True) == 0, report.failures()
    rows = [row for row in report.results if row.runtime == NAME]
    assert {row.artifact for row in rows} == {"forward.onnx", "gradient.onnx"}
    assert {row.provider for row in rows} == {"CPUExecutionProvider"}


def test_kernels_run_forward_and_backward(fused_library: Path, lightning_bundle: Path) -> None:
    session = onnxruntime__fused.load(lightning_bundle / "gradient.onnx", {})
    assert session._fused == ("selective_scan_gated", "selective_scan_gated_backward")
    before = session._calls()
    ids = torch.ones(1, 3, dtype=torch.int64)
    vocabulary = 256
    session.run({"input_ids": ids, "cotangent_logits": torch.ones(1, 3, vocabulary)})
    ran = {op: calls - before[op] for op, calls in session._calls().items()}
    assert set(ran) == set(session._fused)
    assert min(ran.values()) > 0


def test_a_body_that_runs_in_the_kernels_place_is_an_error(
    fused_library: Path, lightning_bundle: Path
) -> None:
    """A session that ONNX Runtime opened without the library."""
    bodies = OnnxRuntimeSession(lightning_bundle / "forward.onnx")
    session = onnxruntime__fused._FusedSession(bodies, fused_library, ["selective_scan_gated"])
    with pytest.raises(RuntimeError, match="but the body of selective_scan_gated"):
        session.run({"input_ids": torch.ones(1, 3, dtype=torch.int64)})


@pytest.mark.parametrize(
    ("domain", "reason"), [("", "nothing to fuse"), ("fuseport.ops", "no fused kernel for Sin")]
)
def test_a_model_with_nothing_for_a_kernel_is_unsupported(
    fused_library: Path, tmp_path: Path, domain: str, reason: str
) -> None:
    onnx.save(one_node("Sin", domain), tmp_path / "m.onnx")
    with pytest.raises(Unsupported, match=reason):
        onnxruntime__fused.load(tmp_path / "m.onnx", {})


@pytest.mark.parametrize("whole", [True, False], ids=["all_are_built", "none_is_built"])
def test_the_library_is_the_prepared_one_where_a_program_has_some_of_the_ops(
    fused_library: Path, lightning_bundle: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """A child, which may not compile, asks for what was compiled for it."""
    asked = []

    def library(specs: Iterable[OpSpec], device: str) -> Path:
        asked.append({spec.name for spec in specs})
        return fused_library

    state = Status("built", str(fused_library)) if whole else Status("buildable", "")
    monkeypatch.setattr(ort, "status", lambda specs, device: state)
    monkeypatch.setattr(ort, "library", library)
    ops = ["selective_scan_gated", "selective_state_update_gated"]
    program = {"ops": [f"fuseport::{op}" for op in ops]}
    onnxruntime__fused.prepare(program)
    onnxruntime__fused.load(lightning_bundle / "forward.onnx", program)
    assert asked == ([] if whole else 2 * [{"selective_scan", "selective_state_update"}])


class TestForAGpu:
    def test_its_own_library_is_taken(
        self, lightning_bundle: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The kernels of a GPU, run by the CPU's provider in its place, forward and backward."""
        path = stand_in.onnxruntime_library()
        settings = stand_in.Settings(path)
        settings.multiprocessors(1)
        settings.order(0)
        asked = []

        def library(specs: Iterable[OpSpec], device: str) -> Path:
            asked.append(({spec.name for spec in specs}, device))
            return path

        monkeypatch.setattr(ort, "library", library)
        monkeypatch.setattr(ort, "status", lambda specs, device: Status("buildable", ""))
        monkeypatch.setitem(_onnxruntime.PROVIDERS, "cuda", "CPUExecutionProvider")
        program = {"device": "cuda", "ops": ["fuseport::selective_scan_gated"]}
        onnxruntime__fused.prepare(program)
        session = onnxruntime__fused.load(lightning_bundle / "gradient.onnx", program)
        assert asked == 2 * [({"selective_scan"}, "cuda")]
        assert session._fused == ("selective_scan_gated", "selective_scan_gated_backward")
        cotangent = torch.randn(1, 3, 256, generator=torch.Generator().manual_seed(0))
        inputs = {"input_ids": torch.ones(1, 3, dtype=torch.int64), "cotangent_logits": cotangent}
        found = session.run(inputs)
        plain = OnnxRuntimeSession(lightning_bundle / "gradient.onnx").run(inputs)
        assert found.keys() == plain.keys()
        for name, value in found.items():
            torch.testing.assert_close(value, plain[name], rtol=1e-3, atol=1e-4)

    def test_nodes_without_a_kernel_are_unsupported(self, tmp_path: Path) -> None:
        onnx.save(one_node("rotary_embedding", ort.DOMAIN), tmp_path / "m.onnx")
        with pytest.raises(Unsupported, match="no fused kernel for rotary_embedding"):
            onnxruntime__fused.load(tmp_path / "m.onnx", {"device": "cuda"})

    def test_without_a_gpu_it_says_what_it_lacks(
        self, lightning_bundle: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv(cuda.ARCHITECTURES, raising=False)
        monkeypatch.setattr(cuda, "_present", lambda: ())
        program = {"device": "cuda", "ops": ["fuseport::selective_scan_gated"]}
        onnxruntime__fused.prepare(program)
        with pytest.raises(Unsupported, match="there is no GPU of compute capability"):
            onnxruntime__fused.load(lightning_bundle / "forward.onnx", program)


def test_nodes_are_found_in_whatever_graph_they_are(tmp_path: Path) -> None:
    def scan(name: str) -> onnx.NodeProto:
        return helper.make_node(name, ["x"], ["y"], domain="fuseport.ops")

    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n"])
    branches = {f"{b}_branch": helper.make_graph([scan(b)], b, [], [y]) for b in ("then", "else")}
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("fuseport.ops", 1)]
    functions = [
        helper.make_function("mine", "block", ["x"], ["y"], [scan("in_block")], opsets),
        helper.make_function("fuseport.ops", "then", ["x"], ["y"], [scan("in_body")], opsets),
    ]
    graph = helper.make_graph([helper.make_node("If", ["c"], ["y"], **branches)], "g", [], [y])
    model = helper.make_model(graph, functions=functions, opset_imports=opsets)
    onnx.save(model, tmp_path / "m.onnx")
    assert onnxruntime__fused._op_types(tmp_path / "m.onnx") == {"then", "else", "in_block"}


class TestWithoutHeaders:
    @pytest.fixture(autouse=True)
    def _nowhere(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FUSEPORT_CACHE", str(tmp_path))
        monkeypatch.setenv(ort.HEADERS, "nowhere")

    def test_the_default_run_says_that_it_is_unsupported_and_why(
        self, lightning_bundle: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(runtimes, "RUNTIMES", (NAME,))
        rows = [row for row in api.verify(lightning_bundle).results if row.runtime == NAME]
        assert [row.verdict for row in rows] == ["unsupported"]
        assert f"{ort.HEADERS} names nowhere" in (rows[0].reason or "")

    def test_who_names_it_is_told_that_it_is_missing(self, lightning_bundle: Path) -> None:
        with pytest.raises(Missing, match=f"{ort.HEADERS} names nowhere") as caught:
            api.verify(lightning_bundle, runtime=[NAME])
        assert caught.value.exit_code == 5


@pytest.mark.parametrize("fused", [False, True])
def test_bfloat16_goes_in_and_out(fused_library: Path, tmp_path: Path, fused: bool) -> None:
    node = helper.make_node("Identity", ["x"], ["y"])
    x, y = (helper.make_tensor_value_info(n, TensorProto.BFLOAT16, [None, 2]) for n in "xy")
    graph = helper.make_graph([node], "g", [x], [y])
    opsets = [helper.make_opsetid("", 20)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), tmp_path / "m.onnx")
    session = OnnxRuntimeSession(tmp_path / "m.onnx", fused_library if fused else None)
    for rows in (0, 3):
        value = torch.randn(rows, 2).bfloat16()
        assert torch.equal(session.run({"x": value})["y"], value)
