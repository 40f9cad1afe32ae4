"""Faults of running and comparing, as a user meets them: 15 to 18."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from click.testing import CliRunner

from fuseport.cli import main
from fuseport.exporter import api
from fuseport.exporter.bundle import hash_file
from fuseport.exporter.models.given import read_given
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.runtimes import Unsupported, _onnxruntime, onnxruntime
from fuseport.exporter.verify import subject
from fuseport.exporter.verify.op_check import contract
from fuseport.exporter.verify.op_check.subject import Refused, Subject, sample
from fuseport.exporter.verify.run import execute
from fuseport.ops import OPS, registration

# It prints while it is imported, made and run, in Python and in C.
NOISY = """
import ctypes
import torch

print("imported")

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        print("{")
        self.one = torch.nn.Linear(6, 5)
        self.other = torch.nn.Linear(5, 3)

    def forward(self, x):
        print("forward")
        ctypes.CDLL(None).puts(b"of C")
        return self.other(torch.tanh(self.one(x)))
"""


class Printing(torch.nn.Module):
    """What TorchScript prints comes from C++."""

    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Linear(6, 5)
        self.other = torch.nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print("}", x.sum())
        return self.other(torch.tanh(self.one(x)))


def test_what_is_printed_leaves_the_json_valid(tmp_path: Path) -> None:
    """Fault 17: by the user's model here, by a program in Python and in the host without it."""
    (tmp_path / "noisy_net.py").write_text(NOISY)
    torch.manual_seed(0)
    printing = Printing()
    torch.save(printing.state_dict(), tmp_path / "net.pt")
    model = f"{tmp_path / 'noisy_net.py'}:Net"
    bundle = api.export(
        tmp_path / "net.pt",
        tmp_path / "bundle",
        model=model,
        inputs=parse_inputs(["x:[batch,6]"]),
        format=["torchscript"],
    )
    file = tmp_path / "forward.pt"
    torch.jit.script(printing).save(str(file))
    command = [sys.executable, "-m", "fuseport.cli", "verify", str(bundle.folder), "--json", "-"]
    options = ["--model", model, "--artifact", str(file), "--trust-native", hash_file(file)]
    named = ["--runtime", "torchscript", "--runtime", "libtorch"]
    done = subprocess.run([*command, *options, *named], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert {row["runtime"] for row in report["results"]} == {"float64", "torchscript", "libtorch"}
    for what in (b"imported", b"forward", b"of C"):
        assert what in done.stderr


@pytest.mark.parametrize("provider", ["CUDAExecutionProvider", "MIGraphXExecutionProvider"])
@pytest.mark.filterwarnings("ignore:Specified provider")
def test_a_provider_that_is_not_here_is_not_replaced(
    provider: str, small_bundle: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 16: ONNX Runtime itself warns, and runs on the CPU."""
    if provider.startswith("CUDA") and torch.cuda.is_available():
        pytest.skip("this machine has it")
    monkeypatch.setitem(_onnxruntime.PROVIDERS, "cpu", provider)
    with pytest.raises(Unsupported, match=f"{provider} was asked for, and .* CPUExecutionProvider"):
        onnxruntime.load(small_bundle[0] / "forward.onnx", {})


def test_a_provider_that_is_not_here_ends_with_5(
    small_bundle: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 16."""
    (tmp_path / "elsewhere_worker.py").write_text(
        "import sys\n"
        "from fuseport.exporter.runtimes import _onnxruntime, _worker\n"
        "_onnxruntime.PROVIDERS['cpu'] = 'MIGraphXExecutionProvider'\n"
        "_worker.main(sys.argv[1])\n"
    )
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    monkeypatch.setenv("PYTHONPATH", path)
    elsewhere = functools.partial(execute, worker="elsewhere_worker")
    monkeypatch.setattr(subject, "execute", elsewhere)
    report = api.verify(small_bundle[0], runtime=["onnxruntime"])
    assert report.exit_code() == 5
    assert "was asked for" in str({row.reason for row in report.results})


def test_inputs_of_every_layout_are_compared(tmp_path: Path) -> None:
    """Fault 15: of no dimension, expanded, and a part of a larger buffer."""
    (tmp_path / "any_net.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.w = torch.nn.Parameter(torch.ones(3))\n"
        "    def forward(self, x, y, s):\n"
        "        return x * self.w * s, y.sum(-1) * self.w.sum()\n"
    )
    torch.save({"w": torch.tensor([1.0, 2.0, 3.0])}, tmp_path / "w.pt")
    inputs = {
        "x": np.broadcast_to(np.array([[0.5], [2.0]], np.float32), (2, 3)),
        "y": np.arange(24, dtype=np.float32).reshape(4, 6)[1::2, 2:5],
        "s": np.float32(3.0),
    }
    tensors = {name: torch.from_numpy(np.array(value)) for name, value in inputs.items()}
    from safetensors.torch import save_file

    save_file(tensors, tmp_path / "inputs.safetensors")
    bundle = api.export(
        tmp_path / "w.pt",
        tmp_path / "bundle",
        model=f"{tmp_path / 'any_net.py'}:Net",
        given=read_given(tmp_path / "inputs.safetensors"),
        format=["torchscript", "onnx"],
    )
    model = f"{tmp_path / 'any_net.py'}:Net"
    report = api.verify(bundle.folder, runtime=["torchscript", "onnxruntime"], model=model)
    assert report.exit_code() == 0, report.failures()
    assert any(row.tensor == "grad/s" for row in report.results)


@pytest.mark.parametrize("name", OPS)
def test_what_does_not_fit_an_op_is_refused_alike(name: str) -> None:
    """Fault 18: in eager, by the reference and under a fake; one line that names op and input.

    A part of what `fuseport ops check --only inputs` does.
    """
    spec = OPS[name]
    registration.ensure(spec)
    checked = Subject(spec, sample(spec.cases, 1, 0), 0)
    tried = 0
    for where, trial in contract.inputs(checked):
        if any(where.endswith(f" of {fault}") for fault in contract._FAULTS):
            try:
                assert trial() is None, where
            except Refused:
                continue
            tried += 1
    assert tried >= 3


GIB = 2**30
# Each: an op, and inputs of which the first has more than 2³¹ elements, though hardly any memory.
ROWS = 2**22 + 3
LARGE = {
    "rms_norm": lambda x, w: (x, w),
    "swiglu": lambda x, w: (x, x),
}


@pytest.mark.faults
@pytest.mark.parametrize("name", LARGE)
def test_more_elements_than_32_bits_count(name: str) -> None:
    """Fault 17: the last rows are what they are alone."""
    if psutil.virtual_memory().available < 8 * GIB:
        pytest.skip("8 GiB of memory are not free")
    generator = torch.Generator().manual_seed(0)
    part = torch.randn(512, generator=generator).bfloat16()
    weight = torch.randn(512, generator=generator).bfloat16()
    op = getattr(__import__("fuseport.ops").ops, name)
    with torch.no_grad():
        out = op(*LARGE[name](part.expand(ROWS, 512), weight))
        alone = op(*LARGE[name](part[None], weight))
    assert out.numel() > 2**31
    for row in (0, 2**22 - 1, ROWS - 1):
        assert torch.equal(out[row], alone[0])


def test_an_unknown_runtime_prints_no_json() -> None:
    """An error is one line on standard error, whatever was asked for on standard output."""
    done = CliRunner().invoke(main, ["verify", "nowhere", "--json", "-"])
    assert done.exit_code == 2
    assert done.stdout == ""
