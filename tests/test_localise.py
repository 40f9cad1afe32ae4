"""Failures are located to the op, in real runtimes; their cause is named, and scripts show them."""

import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper
from safetensors import safe_open

from fuseport.cli import main
from fuseport.exporter import api, formats, models
from fuseport.exporter.bundle import open_bundle
from fuseport.exporter.child import Limits
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.program.provenance import layer
from fuseport.exporter.runtimes._numpy import to_array, to_tensor
from fuseport.exporter.user_code.op_choice import own_ops
from fuseport.exporter.verify.diagnosis import Diagnosis
from fuseport.exporter.verify.localise import Settings, diagnosed, parts
from fuseport.exporter.verify.localise.look import judged
from fuseport.exporter.verify.localise.onnx_file import OnnxFile
from fuseport.exporter.verify.localise.reference import measured
from fuseport.exporter.verify.plan import Job
from fuseport.exporter.verify.report import Report, Row
from fuseport.exporter.verify.sample import read_all
from fuseport.exporter.verify.subject import Subject, programs_of

FOLDER = Path(__file__).parent.parent / "fixtures" / "deep"
GIVEN = {"model": f"{FOLDER / 'deep_net.py'}:Deep", "ops": str(FOLDER / "deep_ops.py")}
DEPTH, WIDTH, LAYER = 4, 8, 2


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of four layers, each of which calls an op of its own."""
    folder = tmp_path_factory.mktemp("deep")
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "norm.weight": (WIDTH,),
        "norm.bias": (WIDTH,),
        "up.weight": (2 * WIDTH, WIDTH),
        "up.bias": (2 * WIDTH,),
        "down.weight": (WIDTH, 2 * WIDTH),
        "down.bias": (WIDTH,),
    }
    names = {f"layers.{i}.{name}": shape for i in range(DEPTH) for name, shape in shapes.items()}
    names |= {"head.weight": (WIDTH, WIDTH), "head.bias": (WIDTH,)}
    state = {n: torch.randn(s, generator=generator) / WIDTH**0.5 for n, s in names.items()}
    torch.save(state, folder / "net.pth")
    bundle = api.export(
        folder / "net.pth",
        folder / "bundle",
        inputs=parse_inputs([f"x:[batch,length,{WIDTH}]"]),
        format=("onnx", "exported_program"),
        model=GIVEN["model"],
        ops=GIVEN["ops"],
    )
    return bundle.folder


def planted(bundle: Path, op: str, number: int, file: Path, of: int = DEPTH) -> Path:
    """A copy of the gradient program in which one node gives 1 % too much."""
    model = onnx.load(bundle / "gradient.onnx")
    nodes = [node for node in model.graph.node if node.op_type == op]
    assert len(nodes) == of
    node = nodes[number]
    output, node.output[0] = node.output[0], "inner"
    constant = numpy_helper.from_array(np.array(1.01, np.float32), "planted")
    model.graph.initializer.append(constant)
    place = list(model.graph.node).index(node)
    model.graph.node.insert(place + 1, helper.make_node("Mul", ["inner", "planted"], [output]))
    onnx.save(model, file)
    return file


def looked_into(
    bundle: Path,
    given: dict[str, str],
    job: Job,
    tensors: list[str],
    work: Path,
    budget: int = 3000,
) -> Diagnosis:
    """The diagnosis of a job that is known to fail, on the samples of the export."""
    opened = open_bundle(bundle)
    samples = {sample.case.name: sample for sample in read_all(bundle / "samples")}
    artifact = "model" if job.runtime == "eager" else job.artifact.name
    rows = [
        Row(job.runtime, None, artifact, job.program, job.way, job.case, tensor, "fail", "off")
        for tensor in tensors
    ]
    with own_ops(given.get("ops")) as own:
        programs = programs_of(opened.manifest, given.get("model"), own)
    settings = Settings(given.get("model"), given.get("ops"), Limits(300.0), budget=budget)
    can_be_run: Any = object()
    subject = Subject(opened, samples, programs, rows=(), notes=(), again=can_be_run)
    found, notes = diagnosed(rows, {job.runtime: [job]}, subject, work, settings)
    assert not notes
    return found[0]


def test_one_command_locates_a_bug_of_the_backward_alone_and_writes_a_script(
    deep: Path, tmp_path: Path
) -> None:
    # Nodes of the backward are in the order of the backward.
    file = planted(deep, "squared_relu_backward", DEPTH - 1 - LAYER, tmp_path / "edited.onnx")
    options = [f"--{name}={value}" for name, value in GIVEN.items()]
    options += ["--runtime=onnxruntime", f"--artifact={file}", "--json=-"]
    options += ["--program=gradient", f"--repro={tmp_path / 'repro'}"]
    run = CliRunner().invoke(main, ["verify", str(deep), *options])
    assert run.exit_code == 1, run.output
    report = Report.from_json(run.stdout)
    (diagnosis,) = report.diagnoses
    assert diagnosis.cause == "export", diagnosis.reason
    assert diagnosis.method == "intermediates"
    found = diagnosis.divergence
    assert found is not None
    assert (found.op, found.module) == ("deep::squared_relu_backward", f"layers.{LAYER}")
    assert (found.direction, found.alone) == ("backward", "wrong here")
    assert found.max_abs_error is not None
    assert found.bound is not None
    assert found.max_abs_error > found.bound
    (script,) = (tmp_path / "repro").rglob("repro.py")
    assert "deep::squared_relu_backward alone" in next(n for n in report.notes if "repro" in n)
    assert without_fuseport(script) == 1
    # The same script, once the bug is gone: a node of the function itself.
    model = onnx.load(script.parent / "edited.onnx")
    kept = [node for node in model.graph.node if node.op_type != "Mul"]
    kept[-1].output[0] = model.graph.output[0].name
    del model.graph.node[:]
    model.graph.node.extend(kept)
    onnx.save(model, script.parent / "edited.onnx")
    assert without_fuseport(script) == 0


def test_a_failure_of_a_model_with_running_statistics_is_located(
    saved_net: Callable[[str], tuple[torch.nn.Module, Path, str]], tmp_path: Path
) -> None:
    code = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6), nn.ReLU(), nn.Conv1d(6, 2, 1))
"""
    _, checkpoint, model = saved_net(code)
    inputs = parse_inputs(["input:[batch,4,length]"])
    bundle = api.export(checkpoint, tmp_path / "b", model=model, inputs=inputs, format="onnx")
    file = planted(bundle.folder, "Relu", 0, tmp_path / "edited.onnx", of=1)
    report = api.verify(bundle.folder, model=model, runtime="onnxruntime", artifact=file)
    (diagnosis,) = report.diagnoses
    assert diagnosis.cause == "export", diagnosis.reason
    found = diagnosis.divergence
    assert found is not None
    assert (found.op, found.direction, found.alone) == ("aten::relu", "forward", "wrong here")


def without_fuseport(script: Path) -> int:
    """How a script ends in a process that cannot import fuseport."""
    code = (
        "import runpy, sys; sys.modules['fuseport'] = None; sys.modules['safetensors'] = None; "
        f"runpy.run_path({str(script)!r}, run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    assert ("MISMATCH" in done.stdout) == (done.returncode == 1), done.stdout
    return done.returncode


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_a_kernel_that_is_wrong_at_one_call_is_located_in_the_model_itself(
    way: str,
    deep: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    number = LAYER if way == "forward" else DEPTH - 1 - LAYER
    monkeypatch.setenv("DEEP_BUG", f"{way}:{number}")
    job = Job("eager", deep / "weights.safetensors", "gradient", "autograd", "every dimension 1")
    tensors = ["output"] if way == "forward" else ["grad/x", f"grad/layers.{LAYER}.up.weight"]
    diagnosis = looked_into(deep, GIVEN, job, tensors, tmp_path)
    found = diagnosis.divergence
    assert found is not None, diagnosis.reason
    assert diagnosis.cause == "kernel", diagnosis.reason
    assert (found.op, found.module) == ("deep::squared_relu", f"layers.{LAYER}")
    assert (found.direction, found.alone) == (way, "wrong here")


def test_a_changed_weight_of_an_exported_program_is_the_artifact_s_fault(
    deep: Path, tmp_path: Path
) -> None:
    with own_ops(GIVEN["ops"]):
        program = torch.export.load(deep / "forward.pt2")
        weight = program.state_dict[f"layers.{LAYER}.down.weight"]
        with torch.no_grad():
            weight[0] *= 1.01
        torch.export.save(program, tmp_path / "edited.pt2")
    job = Job("exported_program", tmp_path / "edited.pt2", "forward", "run", "every dimension 1")
    diagnosis = looked_into(deep, GIVEN, job, ["output"], tmp_path)
    found = diagnosis.divergence
    assert found is not None, diagnosis.reason
    assert diagnosis.cause == "export", diagnosis.reason
    assert (found.op, found.module) == ("aten::linear", f"layers.{LAYER}.down")
    name = f"layers.{LAYER}.down.weight"
    assert diagnosis.reason.split("; ")[-1].startswith(f"its weight {name} is not the model's: ")


def test_a_changed_weight_of_an_onnx_file_is_named_where_a_scan_takes_it(
    state_spaces_bundle: Path, tmp_path: Path
) -> None:
    """A part of a file with a loop in it runs alone only if its inputs say their dimensions."""
    model = onnx.load(state_spaces_bundle / "gradient.onnx")
    name = "backbone.layers.1.mixer.D"
    weight = next(t for t in model.graph.initializer if t.name == name)
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * np.float32(1.5), name))
    onnx.save(model, tmp_path / "edited.onnx")
    job = Job("onnxruntime", tmp_path / "edited.onnx", "gradient", "run", "odd, transposed")
    diagnosis = looked_into(state_spaces_bundle, {}, job, [f"grad/{name}"], tmp_path, 2**28)
    found = diagnosis.divergence
    assert found is not None, diagnosis.reason
    assert (found.module, found.direction) == ("backbone.layers.1.mixer", "forward")
    assert found.op.startswith("fuseport::selective_scan")
    assert found.alone == "wrong here"
    assert f"its weight {name} is not the model's" in diagnosis.reason


def test_a_line_of_torchscript_that_is_wrong_is_located_in_libtorch(
    state_spaces_bundle: Path, tmp_path: Path
) -> None:
    """The bug is in the file's code alone: a program written anew from the model is right."""
    bundle = open_bundle(state_spaces_bundle)
    model = models.rebuild(bundle.manifest["architecture"], bundle.weights)
    gradient = next(p for p in api.capture(model) if p.kind == "gradient")
    place = "backbone.layers.1.mixer.out_proj"
    nodes = [n for n in gradient.exported.graph.nodes if layer(n) == place]
    node = next(n for n in nodes if parts.called(n) == "aten::mm")
    file = tmp_path / "edited.pt"
    times_more(bundle.folder / "gradient.pt", f"v_{node.name}", file)
    job = Job("libtorch", file, "gradient", "run", "odd, transposed")
    wrong = ["grad/backbone.layers.0.mixer.in_proj.weight", f"grad/{place}.weight"]
    diagnosis = looked_into(bundle.folder, {}, job, wrong, tmp_path, 2**28)
    found = diagnosis.divergence
    assert found is not None, diagnosis.reason
    assert (found.tensor, found.op, found.module) == (node.name, "aten::mm", place)
    assert (found.direction, found.alone) == ("forward", "wrong here")
    assert diagnosis.cause == "export", diagnosis.reason
    assert diagnosis.method == "intermediates"


def times_more(script: Path, name: str, file: Path) -> None:
    """A copy of a TorchScript file in which one value is 1 % too large."""
    with zipfile.ZipFile(script) as old, zipfile.ZipFile(file, "w") as new:
        for member in old.namelist():
            content = old.read(member)
            if member.endswith("/torchscript.py"):
                line = re.compile(rf"^    {name} = (.*)$", re.MULTILINE)
                text, count = line.subn(rf"    {name} = torch.mul(\1, 1.01)", content.decode())
                assert count == 1
                content = text.encode()
            new.writestr(member, content)


QUANTISED = """
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(64, 128, bias=False)
        self.down = nn.Linear(128, 64, bias=False)

    def forward(self, x):
        return x + self.down(self.up(x).relu())
"""


def test_a_lower_precision_of_onnx_runtime_s_own_is_named_as_the_runtime_s_fault(
    tmp_path: Path,
) -> None:
    """The weights are of four bits exactly, so the file is right. ONNX Runtime's optimiser has a
    product with such weights round what they are multiplied with to eight bits."""
    (tmp_path / "net.py").write_text(QUANTISED)
    given = {"model": f"{tmp_path / 'net.py'}:Net"}
    generator = torch.Generator().manual_seed(0)
    shapes = {"up.weight": (128, 64), "down.weight": (64, 128)}
    state = {n: torch.randint(-8, 8, s, generator=generator) / 32 for n, s in shapes.items()}
    torch.save(state, tmp_path / "net.pth")
    bundle = api.export(
        tmp_path / "net.pth",
        tmp_path / "bundle",
        model=given["model"],
        inputs=parse_inputs(["x:[batch,length,64]"]),
        opset=21,
        programs=("forward",),
        format=["onnx"],
    ).folder
    model = onnx.load(bundle / "forward.onnx")
    for node in [node for node in model.graph.node if node.op_type == "Transpose"]:
        in_four_bits(model, node)
    file = tmp_path / "forward.int4.onnx"
    onnx.save(model, file)
    job = Job("onnxruntime", file, "forward", "run", "export")
    diagnosis = looked_into(bundle, given, job, ["output"], tmp_path)
    assert diagnosis.cause == "runtime", diagnosis.reason
    assert "onnxruntime without its optimisations" in diagnosis.reason
    found = diagnosis.divergence
    assert found is not None
    # Both are rounded; a product whose result is looked at may be spared.
    assert found.module in ("up", "down")
    assert (found.op, found.alone) == ("aten::linear", "wrong here")


def in_four_bits(model: onnx.ModelProto, node: onnx.NodeProto) -> None:
    """A transposed weight as a constant of four bits, which is multiplied by 1/32."""
    weight = next(t for t in model.graph.initializer if t.name == node.input[0])
    values = np.rint(numpy_helper.to_array(weight).T * 32).astype(np.int8)
    name, scale = f"{weight.name}.int4", f"{weight.name}.scale"
    blocks = np.full((values.shape[0] // 32, values.shape[1]), 1 / 32, np.float32)
    model.graph.initializer.append(
        helper.make_tensor(name, TensorProto.INT4, values.shape, values.flatten().tolist())
    )
    model.graph.initializer.append(numpy_helper.from_array(blocks, scale))
    model.graph.initializer.remove(weight)
    wide = helper.make_node(
        "DequantizeLinear", [name, scale], [node.output[0]], axis=0, block_size=32
    )
    place = list(model.graph.node).index(node)
    model.graph.node.remove(node)
    model.graph.node.insert(place, wide)


def test_every_value_of_an_onnx_file_is_the_node_that_it_is_said_to_be(
    state_spaces_bundle: Path, tmp_path: Path
) -> None:
    bundle = open_bundle(state_spaces_bundle)
    model = models.rebuild(bundle.manifest["architecture"], bundle.weights)
    (sample,) = (s for s in read_all(bundle.folder / "samples") if s.case.name.startswith("odd"))
    for program in api.capture(model):
        file = bundle.folder / f"{program.kind}.onnx"
        opset = formats.DEFAULT_OPSET
        candidate = OnnxFile.of("onnxruntime", "onnx", file, program, opset, bundle.weights)
        with safe_open(sample.file, "pt") as tensors:
            inputs = {
                spec.name: tensors.get_tensor(
                    spec.name.replace("cotangent_", "cotangent/")
                    if spec.name.startswith("cotangent_")
                    else f"input/{spec.name}"
                )
                for spec in program.inputs
            }
        every = parts.shapes(program, inputs)
        names = [name for name in every if name in candidate.visible]
        assert len(names) > 0.9 * len(every), sorted(set(every) - set(names))
        written = candidate.whole(names, tmp_path)
        session = onnxruntime.InferenceSession(str(written.file))
        values = list(dict.fromkeys(written.outputs.values()))
        results = session.run(values, {name: to_array(t) for name, t in inputs.items()})
        found = dict(zip(values, map(to_tensor, results), strict=True))
        known = measured(parts.with_outputs(program, names), inputs, names)
        wrong = [
            name
            for name in names
            if judged(name, found[written.outputs[name]], known[name], backward=True).verdict
            == "fail"
        ]
        assert not wrong


def test_every_node_of_a_gradient_program_says_its_layer(state_spaces_bundle: Path) -> None:
    bundle = open_bundle(state_spaces_bundle)
    model = models.rebuild(bundle.manifest["architecture"], bundle.weights)
    gradient = next(p for p in api.capture(model) if p.kind == "gradient")
    nodes = [n for n in gradient.exported.graph.nodes if parts.called(n).startswith("fuseport::")]
    calls = [n for n in nodes if n.op == "call_function" and not n.name.startswith("getitem")]
    found = [(parts.called(n).removeprefix("fuseport::"), layer(n)) for n in calls]
    assert [entry for entry in found if "unused" not in entry[0]] == [
        ("selective_scan_gated", "backbone.layers.0.mixer"),
        ("selective_scan_gated", "backbone.layers.1.mixer"),
        ("selective_scan_gated_backward", "backbone.layers.1.mixer"),
        ("selective_scan_gated_backward", "backbone.layers.0.mixer"),
    ]


def test_what_was_not_looked_into_is_left_out_when_it_is_not_wanted(
    deep: Path, tmp_path: Path
) -> None:
    run = CliRunner().invoke(
        main, ["verify", str(deep), "--no-localise", f"--repro={tmp_path / 'x'}"]
    )
    assert run.exit_code == 2
    assert "--no-localise" in run.output


def test_a_failure_that_cannot_be_looked_into_says_why(deep: Path, tmp_path: Path) -> None:
    """Without the model's code, and without a `.pt2` file, there is no program to look into."""
    bundle = tmp_path / "bundle"
    shutil.copytree(deep, bundle)
    opened = open_bundle(bundle)
    manifest = {**opened.manifest, "artifacts": []}
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    samples = {sample.case.name: sample for sample in read_all(bundle / "samples")}
    job = Job("onnxruntime", bundle / "forward.onnx", "forward", "run", "export")
    row = Row("onnxruntime", None, "forward.onnx", "forward", "run", "export", "output", "fail")
    settings = Settings(None, GIVEN["ops"])
    subject = Subject(opened, samples, {}, rows=(), notes=(), again=None)
    found, _ = diagnosed([row], {job.runtime: [job]}, subject, tmp_path, settings)
    assert found[0].cause is None
    assert found[0].divergence is None
    assert "--model" in found[0].reason


def test_what_is_lost_with_a_failure_leaves_the_next_one_to_another_child(
    deep: Path, tmp_path: Path
) -> None:
    samples = {sample.case.name: sample for sample in read_all(deep / "samples")}
    jobs, rows = {}, []
    for runtime in ("onnxruntime", "onnx_reference"):
        here = runtime, "forward.onnx", "forward", "run", "export"
        jobs[runtime] = [Job(runtime, deep / here[1], "forward", "run", "export")]
        rows.append(Row(runtime, None, *here[1:], "output", "fail"))
    settings = Settings(None, GIVEN["ops"], Limits(0.3))
    subject = Subject(open_bundle(deep), samples, {}, rows=(), notes=(), again=None)
    found, notes = diagnosed(rows, jobs, subject, tmp_path, settings)
    assert [d.runtime for d in found] == ["onnxruntime", "onnx_reference"]
    assert all("stopped after 0.3 s" in d.reason and d.cause is None for d in found)
    assert notes == ()


def test_a_form_of_backward_is_not_looked_into(deep: Path, tmp_path: Path) -> None:
    """What fails is named by the form; the plain backward has rows of its own."""
    here = "model", "gradient", "autograd forms", "export"
    job = Job("eager", deep / "weights.safetensors", *here[1:])
    row = Row("eager", None, *here, "with gradient hooks", "fail", "backward fails")
    subject = Subject(open_bundle(deep), {}, {}, rows=(), notes=(), again=None)
    assert diagnosed([row], {"eager": [job]}, subject, tmp_path, Settings()) == ((), ())
