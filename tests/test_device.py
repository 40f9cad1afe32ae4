"""Runtimes on a GPU: asked for, they run there, or nothing does; where there is one, rightly."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from fuseport.cli import main
from fuseport.exporter import api, availability, runtimes
from fuseport.exporter.bundle import open_bundle
from fuseport.exporter.errors import Missing, UsageError
from fuseport.exporter.runtimes import RUNTIMES, _device
from fuseport.exporter.verify.sample import read_all
from fuseport.exporter.verify.subject import programs_of

ON_A_GPU = tuple(name for name in RUNTIMES if name != "onnx_reference")
LIGHTNING = Path(__file__).parents[1] / "fixtures/lightning/mamba-kjv.ckpt"
HAS_GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="there is no GPU here")
needs_none = pytest.mark.skipif(HAS_GPU, reason="there is a GPU here")


@needs_none
def test_a_device_that_is_not_here_ends_with_5(
    small_bundle: tuple[Path, str], tmp_path: Path
) -> None:
    """Fault 16, before anything runs."""
    bundle, model = small_bundle
    there = str(tmp_path / "b")
    for command in (
        ["verify", str(bundle), "--model", model, "--reference", "cpu"],
        ["verify", str(bundle), "--model", model, "--self-test"],
        ["bench", str(bundle), "--model", model],
        ["export", str(LIGHTNING), "-o", there, "--format", "aot_inductor"],
    ):
        done = CliRunner().invoke(main, [*command, "--device", "cuda"])
        assert done.exit_code == 5, command
        [line] = [line for line in done.output.splitlines() if line.startswith("fuseport: ")]
        assert line.startswith("fuseport: cuda: ")
        assert ("torch is built without CUDA" in line) == (torch.version.cuda is None)
    assert not Path(there).exists()
    config = tmp_path / "fuseport.toml"
    config.write_text(f'device = "cuda"\n[[checkpoint]]\npath = "{LIGHTNING}"\n')
    done = CliRunner().invoke(main, ["ci", "--config", str(config)])
    assert done.exit_code == 5
    assert "cuda: " in done.output


def test_a_device_that_is_none_is_wrong_usage(small_bundle: tuple[Path, str]) -> None:
    with pytest.raises(UsageError, match="tpu is not a device; there are: cpu, cuda"):
        api.verify(small_bundle[0], device="tpu")


def test_a_device_is_asked_of_what_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All other files serve any: nothing would come of it."""
    monkeypatch.setattr(_device, "missing", lambda device: None)
    with pytest.raises(UsageError, match="add --format aot_inductor; the files of the other"):
        api.export(LIGHTNING, tmp_path / "b", device="cuda")


def test_runtimes_say_where_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all("cpu" in runtimes.devices(name) for name in RUNTIMES)
    assert availability.chosen_runtimes(None) == RUNTIMES
    monkeypatch.setattr(_device, "missing", lambda device: None)
    assert availability.chosen_runtimes(None, "cuda") == ON_A_GPU
    assert availability.chosen_runtimes(None, ops=["fuseport::swiglu"]) == RUNTIMES
    without = tuple(name for name in RUNTIMES if name != "onnxruntime+fused")
    for ops in ((), ["mylib::squared_relu"], ["fuseport::rotary_embedding"]):
        assert availability.chosen_runtimes(None, ops=ops) == without
    fused = ("onnxruntime+fused",)
    assert availability.chosen_runtimes(fused, ops=()) == fused  # as the user says
    with pytest.raises(UsageError, match="onnx_reference does not run on cuda; those that do: ao"):
        availability.chosen_runtimes(["onnx_reference"], "cuda")
    monkeypatch.setattr(_device, "missing", lambda device: "none")
    with pytest.raises(Missing, match="cuda: none"):
        availability.chosen_runtimes(["eager"], "cuda")


def test_a_gpu_computes_without_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert _device.device_of({}).type == "cpu"
        assert torch.backends.cudnn.allow_tf32
        assert torch.get_float32_matmul_precision() == "high"
        assert _device.device_of({"device": "cuda"}).type == "cuda"
        assert not torch.backends.cudnn.allow_tf32
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.set_float32_matmul_precision(precision)


@needs_none
def test_nothing_runs_on_the_cpu_instead(
    small_bundle: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 16, where the GPU is lost after it was seen: torch raises, ONNX Runtime would warn."""
    monkeypatch.setattr(_device, "missing", lambda device: None)
    bundle, model = small_bundle
    report = api.verify(bundle, model=model, device="cuda", localise=False)
    rows = [row for row in report.results if row.runtime != "float64"]
    others = {"libtorch", "onnxruntime", "torchscript"}
    assert {row.runtime for row in rows} == {"eager", *others}
    assert not [row for row in rows if row.verdict == "pass"]
    assert {row.provider for row in rows if row.runtime == "onnxruntime"} == {
        "CUDAExecutionProvider"
    }
    assert report.exit_code() not in (0, 1)
    assert report.environment["device"] == "cuda"


@pytest.mark.parametrize("name", ["lightning_bundle", "huggingface_bundle"])
def test_all_of_torch_runs_where_its_inputs_are(name: str, request: pytest.FixtureRequest) -> None:
    """On the meta device, which computes nothing and refuses a tensor of the CPU as a GPU does."""
    bundle = open_bundle(request.getfixturevalue(name))
    programs = programs_of(bundle.manifest, None, None, "meta")
    [sample] = (s for s in read_all(bundle.folder / "samples") if s.case.name == "export")
    stored = {key: tensor.to("meta") for key, tensor in load_file(sample.file).items()}
    inputs = {
        spec["name"]: stored[f"input/{spec['name']}"] for spec in programs["forward"]["inputs"]
    }
    cotangents = {
        key.removeprefix("cotangent/"): tensor
        for key, tensor in stored.items()
        if key.startswith("cotangent/")
    }
    passed = inputs | {f"cotangent_{n}": tensor for n, tensor in cotangents.items()}
    found = [("eager", "forward", bundle.weights)]
    found += [
        (entry["format"], entry["program"], bundle.folder / entry["file"])
        for entry in bundle.manifest["artifacts"]
        if entry["format"] in ("torchscript", "exported_program")
    ]
    assert len(found) == 5
    for runtime, program, file in found:
        session: Any = runtimes.get(runtime).load(file, programs[program])
        assert session.device.type == "meta"
        names = [spec["name"] for spec in programs[program]["inputs"]]
        results = session.run({n: passed[n] for n in names})
        if program == "forward":
            results |= session.differentiate(inputs, cotangents)
        devices = {n: t.device.type for n, t in results.items() if t is not None}
        assert set(devices.values()) == {"meta"}, (runtime, program)
        assert set(devices) >= {spec["name"] for spec in programs["gradient"]["outputs"]}


@needs_gpu
def test_all_runtimes_of_a_gpu_pass(lightning_bundle: Path, tmp_path: Path) -> None:
    """Against float64 on the CPU: outputs and gradients, with the fused ops' kernels of the GPU."""
    file = tmp_path / "report.json"
    done = CliRunner().invoke(
        main, ["verify", str(lightning_bundle), "--device", "cuda", "--json", str(file)]
    )
    report = json.loads(file.read_text(encoding="utf-8"))
    wrong = [row for row in report["results"] if row["verdict"] not in ("pass", "unsupported")]
    assert not wrong
    passed = {row["runtime"] for row in report["results"] if row["verdict"] == "pass"}
    assert {"eager", "exported_program", "torchscript"} <= passed
    assert done.exit_code == 0
