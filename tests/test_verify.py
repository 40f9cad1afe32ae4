"""Verification end to end, in real runtimes: it catches what is planted, and nothing else."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from fuseport.exporter import api, runtimes
from fuseport.exporter.bundle import open_bundle
from fuseport.exporter.errors import CorruptInput, UsageError
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.runtimes import RUNTIMES
from fuseport.exporter.verify.compare import Tolerance
from fuseport.exporter.verify.plan import cases
from fuseport.exporter.verify.report import FLOAT64, Report, Row
from fuseport.exporter.verify.run import Limits
from fuseport.exporter.verify.subject import prepare

Model = onnx.ModelProto


def compared(report: Report) -> list[Row]:
    return [row for row in report.results if row.runtime != FLOAT64]


def failed(report: Report) -> set[str]:
    return {row.tensor for row in report.results if row.verdict == "fail"}


def planted(bundle: Path, change: Callable[[Model], None], file: Path) -> Report:
    """The verdict on a copy of the gradient program with a bug in it, in ONNX Runtime."""
    model = onnx.load(bundle / "gradient.onnx")
    change(model)
    onnx.save(model, file)
    return api.verify(bundle, runtime=["onnxruntime"], artifact=file, localise=False)


def scaled(name: str, factor: float) -> Callable[[Model], None]:
    """One channel of a parameter, changed a little."""

    def change(model: Model) -> None:
        tensor = next(t for t in model.graph.initializer if t.name == name)
        values = numpy_helper.to_array(tensor).copy()
        values[len(values) // 2] *= factor
        tensor.CopyFrom(numpy_helper.from_array(values, name))

    return change


def before(output: str, op: str, constant: float) -> Callable[[Model], None]:
    """An operator more at the end of an output."""

    def change(model: Model) -> None:
        for node in model.graph.node:
            node.output[:] = ["inner" if name == output else name for name in node.output]
            node.input[:] = ["inner" if name == output else name for name in node.input]
        value = np.array(constant, dtype=np.float32)
        model.graph.initializer.append(numpy_helper.from_array(value, "planted"))
        model.graph.node.append(onnx.helper.make_node(op, ["inner", "planted"], [output]))

    return change


def swapped(one: str, other: str) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        names = {one: other, other: one}
        for node in model.graph.node:
            node.output[:] = [names.get(name, name) for name in node.output]

    return change


def scan_inputs(first: int, second: int, op: str) -> Callable[[Model], None]:
    """Two inputs of the same shape of every scan, exchanged."""

    def change(model: Model) -> None:
        found = [node for node in model.graph.node if node.op_type == op]
        assert found, {node.op_type for node in model.graph.node}
        for node in found:
            node.input[first], node.input[second] = node.input[second], node.input[first]

    return change


def output_removed(name: str) -> Callable[[Model], None]:
    def change(model: Model) -> None:
        kept = [value for value in model.graph.output if value.name != name]
        del model.graph.output[:]
        model.graph.output.extend(kept)

    return change


def output_added(model: Model) -> None:
    node = onnx.helper.make_node("Neg", [model.graph.output[0].name], ["grad/extra"])
    model.graph.node.append(node)
    value = onnx.helper.make_tensor_value_info("grad/extra", onnx.TensorProto.FLOAT, None)
    model.graph.output.append(value)


LAYER = "backbone.layers.0.mixer"
BUGS = {
    "1 % in a channel of a weight": (
        scaled(f"{LAYER}.out_proj.weight", 1.01),
        f"grad/{LAYER}.conv1d.weight",
    ),
    "0.1 % in a channel of a weight": (
        scaled(f"{LAYER}.in_proj.weight", 1.001),
        f"grad/{LAYER}.conv1d.weight",
    ),
    "the sign of a gradient": (before(f"grad/{LAYER}.D", "Mul", -1.0), f"grad/{LAYER}.D"),
    "a gradient of zero": (before(f"grad/{LAYER}.D", "Mul", 0.0), f"grad/{LAYER}.D"),
    "0.1 % in a gradient": (before(f"grad/{LAYER}.A_log", "Mul", 1.001), f"grad/{LAYER}.A_log"),
    "one gradient for another": (
        swapped(f"grad/{LAYER}.norm.weight".replace(".mixer", ""), "grad/backbone.norm_f.weight"),
        "grad/backbone.norm_f.weight",
    ),
    "B and C exchanged in the scan": (scan_inputs(3, 4, "selective_scan_gated"), "logits"),
    "an output missing": (output_removed(f"grad/{LAYER}.D"), f"grad/{LAYER}.D"),
    "an output nobody asked for": (output_added, "grad/extra"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught_and_named(
    bug: str, state_spaces_bundle: Path, tmp_path: Path
) -> None:
    change, tensor = BUGS[bug]
    report = planted(state_spaces_bundle, change, tmp_path / "edited.onnx")
    assert report.exit_code() == 1
    assert tensor in failed(report)
    assert {row.artifact for row in compared(report)} == {"edited.onnx"}
    assert any(tensor in line and "edited.onnx" in line for line in report.failures())


def test_an_unchanged_copy_passes(state_spaces_bundle: Path, tmp_path: Path) -> None:
    report = planted(state_spaces_bundle, lambda model: None, tmp_path / "same.onnx")
    assert report.exit_code() == 0, report.failures()
    rows = [row for row in compared(report) if not row.way.endswith("forms")]
    names = {row.tensor for row in rows}
    manifest = open_bundle(state_spaces_bundle).manifest
    assert names == {entry["name"] for entry in manifest["programs"]["gradient"]["outputs"]}


def test_every_runtime_case_and_gradient_is_compared(huggingface_bundle: Path) -> None:
    report = api.verify(huggingface_bundle)
    manifest = open_bundle(huggingface_bundle).manifest
    formats = {None, *(entry["format"] for entry in manifest["artifacts"])}
    able = {n for n in RUNTIMES if runtimes.get(n).FORMAT in formats}
    missing = {n for n in able if runtimes.get(n).missing() is not None}
    assert report.exit_code(strict=not missing) == 0, report.failures()
    expected = {entry["name"] for entry in manifest["programs"]["gradient"]["outputs"]}
    expected |= set(manifest["programs"]["gradient"]["none"])
    sizes = {"batch": 2, "length": 16}
    names = {case.name for case in cases(sizes, 0)}
    gradients = [row for row in compared(report) if row.program == "gradient"]
    jobs = {(r.runtime, r.artifact, r.way) for r in gradients if not r.way.endswith("forms")}
    assert {runtime for runtime, _, _ in jobs} == able - missing
    ways = {(runtime, way) for runtime, _, way in jobs}
    assert {("eager", "autograd"), ("onnxruntime", "run"), ("libtorch", "autograd")} <= ways
    for runtime, artifact, way in jobs:
        for case in names:
            found = [
                row.tensor
                for row in compared(report)
                if (row.runtime, row.artifact, row.way) == (runtime, artifact, way)
                and (row.program, row.case) == ("gradient", case)
            ]
            assert sorted(found) == sorted(expected), (runtime, artifact, way, case)


class TestNothingCompared:
    def test_a_runtime_of_another_format_is_never_a_pass(
        self, state_spaces_bundle: Path, tmp_path: Path
    ) -> None:
        file = tmp_path / "x.onnx"
        shutil.copy(state_spaces_bundle / "forward.onnx", file)
        try:
            report = api.verify(state_spaces_bundle, runtime=["torchscript"], artifact=file)
        except UsageError:
            return
        assert report.exit_code() != 0

    def test_a_named_runtime_without_jobs_is_usage(
        self, state_spaces_bundle: Path, tmp_path: Path
    ) -> None:
        subject = prepare(open_bundle(state_spaces_bundle), None, tmp_path, lambda _: None)
        file = tmp_path / "x.onnx"
        shutil.copy(state_spaces_bundle / "forward.onnx", file)
        assert list(subject.jobs("torchscript", file, None)) == []
        with pytest.raises(UsageError, match="torchscript"):
            list(subject.jobs("torchscript", file, None, named=True))
        assert list(subject.jobs("onnxruntime", file, None, named=True))

    @pytest.mark.parametrize(
        ("name", "error"),
        [("absent.onnx", UsageError), ("x.txt", UsageError), ("x.onnx", CorruptInput)],
    )
    def test_an_artifact_that_is_none_is_refused(
        self, name: str, error: type[Exception], state_spaces_bundle: Path, tmp_path: Path
    ) -> None:
        if name != "absent.onnx":
            (tmp_path / name).write_bytes(b"\x00garbage")
        with pytest.raises(error, match=name):
            api.verify(state_spaces_bundle, artifact=tmp_path / name)


def test_a_tolerance_replaces_the_rule(state_spaces_bundle: Path, tmp_path: Path) -> None:
    change = scaled(f"{LAYER}.out_proj.weight", 1.01)
    assert planted(state_spaces_bundle, change, tmp_path / "x.onnx").exit_code() == 1
    for tolerance, code in ((Tolerance(atol=10.0), 0), (Tolerance(atol=1e-12), 1)):
        report = api.verify(
            state_spaces_bundle,
            runtime=["onnxruntime"],
            artifact=tmp_path / "x.onnx",
            tolerance=tolerance,
            localise=False,
        )
        assert report.exit_code() == code


def test_a_runtime_out_of_memory_is_an_error_of_its_own(state_spaces_bundle: Path) -> None:
    report = api.verify(
        state_spaces_bundle, runtime=["onnxruntime"], limits=Limits(60.0, 100 * 2**20)
    )
    assert report.exit_code() == 6
    # What was answered before it was noticed stands.
    failed = [row for row in compared(report) if row.verdict != "pass"]
    assert failed
    assert all(row.verdict == "error" and row.crash for row in failed)


def test_progress_is_told_and_nothing_is_left(
    state_spaces_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    told: list[str] = []
    before = sorted(state_spaces_bundle.rglob("*"))
    api.verify(state_spaces_bundle, runtime=["onnxruntime"], progress=told.append)
    assert any("onnxruntime: gradient.onnx: every dimension 1" in line for line in told)
    assert not list(tmp_path.iterdir())
    assert sorted(state_spaces_bundle.rglob("*")) == before


@pytest.mark.parametrize(
    ("guard", "refused"),
    [
        ("x = x.view(-1, 6).view(-1, 3, 6)", {"odd, transposed"}),
        ("assert x.is_contiguous()", {"odd, transposed", "past a chunk, sliced"}),
    ],
)
def test_a_layout_that_the_model_s_own_code_does_not_take_is_no_crash(
    guard: str, refused: set[str], tmp_path: Path
) -> None:
    """Its programs take any: they copy what comes in so."""
    code = (
        "from torch import nn\n"
        "class Net(nn.Linear):\n"
        "    def __init__(self):\n"
        "        super().__init__(6, 2)\n"
        "    def forward(self, x):\n"
        f"        {guard}\n"
        "        return super().forward(x.reshape(-1, 6)).view(-1, 3, 2)\n"
    )
    (tmp_path / "net.py").write_text(code)
    torch.save(torch.nn.Linear(6, 2).state_dict(), tmp_path / "w.pth")
    model = f"{tmp_path / 'net.py'}:Net"
    bundle = api.export(
        tmp_path / "w.pth",
        tmp_path / "b",
        inputs=parse_inputs(["x:[batch,3,6]"]),
        format=("exported_program",),
        model=model,
    ).folder
    report = api.verify(bundle, runtime=["eager", "exported_program"], model=model)
    assert report.exit_code() == 0, report.failures()
    rows = [row for row in compared(report) if row.verdict == "unsupported"]
    assert {row.runtime for row in rows} == {"eager"}
    assert {row.case for row in rows} == refused
    assert all("no inputs of this memory layout" in str(row.reason) for row in rows)


def test_a_model_that_changed_since_the_export_is_told_and_no_artifact_blamed(
    tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    code = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(4, 3)
    def forward(self, x):
        return self.a(x).sin()
"""
    checkpoint, model = saved_with(code, a=nn.Linear(4, 3))
    inputs = parse_inputs(["x:[batch,4]"])
    bundle = api.export(checkpoint, tmp_path / "b", model=model, inputs=inputs, format="onnx")
    file = Path(model.rpartition(":")[0])
    file.write_text(code.replace(".sin()", ".cos()"))
    report = api.verify(bundle.folder, model=model, runtime="onnxruntime")
    assert report.exit_code() == 1
    assert any("gives something else than at the export: its code" in n for n in report.notes)
    reasons = {str(r.reason) for r in report.results if r.artifact == "samples"}
    assert any(r.startswith("the model itself is not as at the export: off by") for r in reasons)
    assert not any("tolerance" in reason for reason in reasons)
    assert report.diagnoses
    for diagnosis in report.diagnoses:
        assert diagnosis.cause is None
        assert "not as at the export" in diagnosis.reason
