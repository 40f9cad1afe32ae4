"""Ops at random shapes: a few draws of each, and that a bug in a kernel is seen."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fuseport.exporter.verify.mutants.ops import mutants
from fuseport.exporter.verify.mutants.planting import planted
from fuseport.ops import OPS, support

FILE = Path(__file__).parent / "benchmarks" / "random_shapes.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("random_shapes", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_op_with_kernels_for_a_gpu_is_drawn(script: ModuleType) -> None:
    assert set(script.DRAWS) == {
        name for name, spec in OPS.items() if support.support(spec)["CUDA"].present
    }


@pytest.mark.parametrize("device", ["cpu", "stand-in"])
@pytest.mark.parametrize("op", sorted(name for name, spec in OPS.items() if spec.has("kernel.cu")))
def test_draws_are_right_and_repeat(op: str, device: str, script: ModuleType) -> None:
    tried = [script.tried(op, number, device) for number in range(4)]
    assert [fault for fault, _ in tried if fault] == []
    assert any(taken for _, taken in tried)
    assert str(script.drawn(op, 1)) == str(script.drawn(op, 1)) != str(script.drawn(op, 2))


@pytest.mark.parametrize(
    ("op", "number"),
    [
        ("gated_delta_rule", 195),
        ("gated_delta_rule", 251),
        ("gated_delta_rule", 267),
        ("ssd_chunk_scan", 10),
        ("ssd_chunk_scan", 129),
    ],
)
def test_long_sums_on_tensor_cores_are_as_exact_as_those_of_float32(
    op: str, number: int, script: ModuleType
) -> None:
    """Draws that were wrong on a GPU: tensor cores cut off, and all errors went one way."""
    point = script.drawn(op, number, "cuda")
    assert point.dtype == torch.float32
    assert script.judged(op, point, "stand-in") == (None, True)


def test_a_bug_is_seen(script: ModuleType) -> None:
    spec = OPS["selective_scan"]
    script.tried(spec.name, 0, "cpu")  # registered
    wrong = next(m for m in mutants(spec) if m.kind.name == "gradient off by 1 %")
    with planted(spec, wrong):
        found = [script.tried(spec.name, number, "cpu")[0] for number in range(12)]
    assert [text for text in found if text and "grad/" in text]


def test_the_command_writes_what_it_tried(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    options = ["--op", "rms_norm", "--op", "cross_scan", "--count", "8", "--jobs", "1"]
    command = [sys.executable, FILE, *options, "--json", file]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("8 draws of 2 ops on cpu, 0 wrong")
    content = json.loads(file.read_text())["cpu"]
    assert [row["draws"] for row in content["results"]] == [4, 4]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_the_command_says_that_there_is_no_gpu(script: ModuleType) -> None:
    assert script.main(["--device", "cuda", "--json", "-"]) == 5
