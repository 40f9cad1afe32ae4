"""The job that a user comes for: a checkpoint in, verified artifacts out, by the command line."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

FIXTURES = Path(__file__).parent.parent / "fixtures"
BUNDLES = ("lightning_bundle", "state_spaces_bundle", "huggingface_bundle")
RUNTIMES = {"eager", "torchscript", "exported_program", "onnxruntime", "onnx_reference"}


def fuseport(*arguments: str | Path, timeout: float = 600) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "fuseport.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def report_of(*arguments: str | Path) -> tuple[int, dict[str, Any]]:
    done = fuseport("verify", *arguments, "--json", "-")
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize("name", BUNDLES)
def test_every_fixture_verifies_in_every_runtime(name: str, request: pytest.FixtureRequest) -> None:
    bundle = request.getfixturevalue(name)
    code, report = report_of(bundle)
    assert code == 0, [row for row in report["results"] if row["verdict"] != "pass"][:5]
    assert report["summary"]["fail"] == report["summary"]["error"] == 0
    assert {row["runtime"] for row in report["results"]} >= RUNTIMES

    manifest = json.loads((bundle / "manifest.json").read_text())
    inputs = [
        spec for spec in manifest["programs"]["forward"]["inputs"] if "float" in spec["dtype"]
    ]
    weights = manifest["programs"]["gradient"]["outputs"]
    expected = {spec["name"] for spec in weights if spec["name"].startswith("grad/")}
    expected |= set(manifest["programs"]["gradient"]["none"])
    assert len(expected) >= 20 + len(inputs)
    ways = {
        (row["runtime"], row["artifact"], row["way"])
        for row in report["results"]
        if row["program"] == "gradient" and row["runtime"] in RUNTIMES
        if not row["way"].endswith("forms")
    }
    assert {way for runtime, _, way in ways if runtime == "torchscript"} == {"run", "autograd"}
    cases = {row["case"] for row in report["results"]}
    assert "every dimension 1" in cases
    assert "odd, transposed" in cases
    for runtime, artifact, way in ways:
        for case in cases:
            found = {
                row["tensor"]
                for row in report["results"]
                if (row["runtime"], row["artifact"], row["way"]) == (runtime, artifact, way)
                and row["case"] == case
                and row["tensor"].startswith("grad/")
                and row["verdict"] == "pass"
            }
            assert found == expected, (runtime, artifact, way, case)


def test_a_changed_initializer_is_named(lightning_bundle: Path, tmp_path: Path) -> None:
    model = onnx.load(lightning_bundle / "gradient.onnx")
    name = "backbone.layers.1.mixer.D"
    initializer = next(i for i in model.graph.initializer if i.name == name)
    changed = numpy_helper.to_array(initializer) * np.float32(1.01)
    initializer.CopyFrom(numpy_helper.from_array(changed, name))
    edited = tmp_path / "edited.onnx"
    onnx.save(model, edited)

    done = fuseport("verify", lightning_bundle, "--artifact", edited, "--runtime", "onnxruntime")
    assert done.returncode == 1
    [failed] = [line for line in done.stdout.splitlines() if line.startswith("fail: ")]
    assert "33 tensors" in failed
    [diagnosis] = [line for line in done.stdout.splitlines() if line.startswith("diagnosis: ")]
    assert f"its weight {name} is not the model's: it is off by up to 0.01" in diagnosis
    assert "it begins at backbone.layers.1.mixer: fuseport::selective_scan" in diagnosis


def test_a_gradient_of_the_wrong_sign_is_the_only_failure(
    lightning_bundle: Path, tmp_path: Path
) -> None:
    model = onnx.load(lightning_bundle / "gradient.onnx")
    name = "grad/backbone.layers.0.mixer.A_log"
    producer = next(node for node in model.graph.node if name in node.output)
    producer.output[list(producer.output).index(name)] = "right"
    model.graph.node.append(onnx.helper.make_node("Neg", ["right"], [name]))
    edited = tmp_path / "edited.onnx"
    onnx.save(model, edited)

    only = ["--runtime", "onnxruntime", "--no-localise"]
    code, report = report_of(lightning_bundle, "--artifact", edited, *only)
    assert code == 1
    # At length 1 no state is carried over, and the gradient of A is zero with either sign.
    failed = {(row["tensor"], row["case"]) for row in report["results"] if row["verdict"] == "fail"}
    assert {tensor for tensor, _ in failed} == {name}
    assert len(failed) == len({row["case"] for row in report["results"]}) - 2


def test_a_change_inside_the_bundle_names_the_file(lightning_bundle: Path, tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    shutil.copytree(lightning_bundle, bundle)
    content = bytearray((bundle / "forward.onnx").read_bytes())
    content[len(content) // 2] ^= 1
    (bundle / "forward.onnx").write_bytes(content)
    done = fuseport("verify", bundle)
    assert done.returncode == 4
    assert "forward.onnx" in done.stderr
    assert done.stdout == ""


def test_an_artifact_that_no_runtime_runs_is_no_pass(
    lightning_bundle: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "forward.onnx"
    shutil.copy(lightning_bundle / "forward.onnx", copy)
    done = fuseport("verify", lightning_bundle, "--artifact", copy, "--runtime", "torchscript")
    assert done.returncode not in (0, 1)


def test_the_options_of_the_issue(tmp_path: Path) -> None:
    checkpoint = FIXTURES / "lightning" / "mamba-kjv.ckpt"
    options = ["--format", "onnx", "--program", "gradient", "--opset", "18", "--dtype", "bfloat16"]
    output = tmp_path / "b"
    first = fuseport("export", checkpoint, "-o", output, *options)
    assert first.returncode == 0, first.stderr
    assert (
        "9 parameters stay float32 in bfloat16: those called mixer.A_log, mixer.D" in first.stdout
    )
    again = fuseport("export", checkpoint, "-o", output, *options)
    assert again.returncode == 2
    assert "--force" in again.stderr
    assert fuseport("export", checkpoint, "-o", output, *options, "--force").returncode == 0
    assert {p.name for p in output.iterdir()} == {
        "gradient.onnx", "manifest.json", "ops", "samples", "weights.safetensors",
    }  # fmt: skip
    model = onnx.load(output / "gradient.onnx")
    assert {entry.domain: entry.version for entry in model.opset_import}[""] == 18
    code, report = report_of(output)
    assert code == 0, report["summary"]
    judged = {r["runtime"] for r in report["results"] if r["verdict"] == "pass"}
    assert {"eager", "onnx_reference"} <= judged
    # ONNX Runtime has few bfloat16 kernels for the CPU: it runs this, or says what it lacks.
    verdicts = {r["verdict"] for r in report["results"] if r["runtime"] == "onnxruntime"}
    assert verdicts in ({"pass"}, {"unsupported"})


USER_CODE = """
import torch
from torch import nn
from fuseport.ops.selective_scan import selective_scan

class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.mix = nn.Linear(width, 2 * width)
        self.log_a = nn.Parameter(torch.zeros(width, 4))
        self.b = nn.Parameter(torch.randn(width, 4))

    def forward(self, x):
        u, delta = self.mix(x).transpose(1, 2).chunk(2, dim=1)
        y = selective_scan(u, delta, -self.log_a.exp(), self.b, self.b, delta_softplus=True)
        return y.transpose(1, 2)
"""


def test_a_model_of_the_users_own(tmp_path: Path) -> None:
    import torch

    code = tmp_path / "their_net.py"
    code.write_text(USER_CODE)
    namespace: dict[str, Any] = {}
    exec(USER_CODE, namespace)
    torch.manual_seed(0)
    torch.save(namespace["Net"](width=8).state_dict(), tmp_path / "net.pt")
    model, bundle = f"{code}:Net", tmp_path / "b"
    done = fuseport(
        "export", tmp_path / "net.pt", "-o", bundle, "--model", model,
        "--input-shapes", "x:[batch,length,8]",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr

    code_with, with_code = report_of(bundle, "--model", model)
    assert code_with == 0, with_code["summary"]
    assert "grad/x" in {row["tensor"] for row in with_code["results"]}
    assert "eager" in {row["runtime"] for row in with_code["results"]}

    code.unlink()  # code is never run unasked: the stored samples are compared
    code_without, without = report_of(bundle)
    assert code_without == 0, without["summary"]
    assert "samples" in without["notes"][0]
    assert "eager" not in {row["runtime"] for row in without["results"]}
