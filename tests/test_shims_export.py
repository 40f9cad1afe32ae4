"""Model code as others write it, exported and verified through stand-ins; its own backward too."""

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from fuseport.cli import main
from fuseport.exporter import api, shims
from fuseport.exporter.bundle import open_bundle
from fuseport.exporter.errors import Missing, UsageError
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.user_code import imported
from fuseport.exporter.verify.report import OWN_BACKWARD, Report

# Written as Vim's and VFIMamba's files are: imports at the top, an autograd function over the raw
# extension, a Triton kernel beside it, an assertion of float32 in the forward.
CODE = """
import selective_scan_cuda
import torch
import triton
import triton.language as tl
from helper_of_the_model import WIDTH
from mamba_ssm.modules.mamba_simple import Mamba
from mamba_ssm.utils.generation import GenerationMixin
from torch import nn

try:
    from mamba_ssm.ops.triton.layer_norm import RMSNorm, layer_norm_fn, rms_norm_fn
except ImportError:
    RMSNorm, layer_norm_fn, rms_norm_fn = None, None, None


@triton.jit
def kernel(X, BLOCK: tl.constexpr):
    tl.store(X, tl.load(X))


class Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u, delta, A, B, C, D, z, bias):
        out, x, out_z = selective_scan_cuda.fwd(u, delta, A, B, C, D, z, bias, True)
        ctx.save_for_backward(u, delta, A, B, C, D, z, bias, x, out)
        return out_z

    @staticmethod
    def backward(ctx, dout):
        u, delta, A, B, C, D, z, bias, x, out = ctx.saved_tensors
        du, ddelta, dA, dB, dC, dD, dbias, dz = selective_scan_cuda.bwd(
            u, delta, A, B, C, D, z, bias, dout, x, out, None, True, False
        )
        return du, ddelta, dA, dB, dC, dD, dz, dbias


scan = Scan.apply


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixer = Mamba(WIDTH, 2, bimamba_type="v2", if_divide_out=True)
        self.norm = RMSNorm(WIDTH)
        self.A_log = nn.Parameter(torch.zeros(WIDTH, 2))
        self.D = nn.Parameter(torch.ones(WIDTH))
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.proj = nn.Linear(WIDTH, 2 * WIDTH + 4)

    def forward(self, x):
        assert x.dtype == torch.float32
        x, residual = rms_norm_fn(x, self.norm.weight, None, residual=x, prenorm=True, eps=1e-5)
        p = self.proj(self.mixer(x)).mT
        B, C, dt, z = p.split([2, 2, WIDTH, WIDTH], 1)
        A = -torch.exp(self.A_log.float())
        y = scan(x.mT.contiguous(), dt, A, B[:, None], C[:, None], self.D, z, self.bias)
        return y.mT + residual
"""
WRONG = CODE.replace(
    "du, ddelta, dA, dB, dC, dD, dz, dbias\n", "du, ddelta, dA, dB, dC, dD, -dz, dbias\n"
)


def written(folder: Path, code: str) -> tuple[Path, Path]:
    """A model file with a neighbour, and a checkpoint for it."""
    folder.mkdir(exist_ok=True)
    file = folder / "their_model.py"
    file.write_text(code)
    (folder / "helper_of_the_model.py").write_text("WIDTH = 4\n")
    with shims.installed():
        net = imported("test", str(file)).Net()
    torch.manual_seed(0)
    for parameter in net.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    checkpoint = folder / "weights.pth"
    torch.save(net.state_dict(), checkpoint)
    return file, checkpoint


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The model's file, and its bundle, by the command."""
    folder = tmp_path_factory.mktemp("theirs")
    file, checkpoint = written(folder, CODE)
    bundle = folder / "bundle"
    command = ["export", str(checkpoint), "-o", str(bundle), "--model", f"{file}:Net", "--shim"]
    command += ["auto", "--shim", "triton", "--input-shapes", "x:[2,length,4]", "--format", "onnx"]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    assert "stand-ins took the place of mamba_ssm, selective_scan_cuda, triton" in done.output
    return file, bundle


def verified(file: Path, bundle: Path, *runtimes: str) -> tuple[int, Report]:
    out = bundle.with_suffix(".json")
    command = ["verify", str(bundle), "--model", f"{file}:Net", "--json", str(out)]
    done = CliRunner().invoke(main, [*command, *(f"--runtime={name}" for name in runtimes)])
    assert out.exists(), done.output
    return done.exit_code, Report.from_json(out.read_text())


def test_a_model_of_others_passes_forward_and_gradient(theirs: tuple[Path, Path]) -> None:
    code, report = verified(*theirs, "eager", "onnxruntime")
    assert code == 0, report.failures()
    assert Report.from_json(report.to_json()).results == report.results
    ways = {(row.runtime, row.program, row.way) for row in report.results}
    assert ("eager", "gradient", OWN_BACKWARD) in ways
    assert ("onnxruntime", "gradient", "run") in ways


def test_the_programs_hold_the_ops_and_any_length(theirs: tuple[Path, Path]) -> None:
    manifest = open_bundle(theirs[1]).manifest
    assert {"fuseport::selective_scan_gated", "fuseport::selective_scan_gated_backward"} <= set(
        manifest["ops"]
    )
    # What only the extension's second result needs is not computed.
    assert "fuseport::selective_scan" not in manifest["ops"]
    config = manifest["architecture"]["config"]
    assert config["shims"] == ["mamba_ssm", "selective_scan_cuda", "triton"]
    assert config["functions"] == ["Scan"]
    assert not any("not compared" in note for note in manifest["notes"])


def test_a_wrong_backward_of_the_models_own_is_a_row_of_its_own(tmp_path: Path) -> None:
    file, checkpoint = written(tmp_path / "wrong", WRONG)
    bundle = api.export(
        checkpoint,
        tmp_path / "bundle",
        model=f"{file}:Net",
        shim="auto",
        inputs=parse_inputs(["x:[1,3,4]"]),
        format=["torchscript"],
    ).folder
    code, report = verified(file, bundle, "eager", "torchscript")
    assert code == 1
    failed = {row for row in report.results if row.verdict == "fail"}
    assert {row.way for row in failed} == {OWN_BACKWARD}
    assert {"grad/proj.weight"} <= {row.tensor for row in failed}
    assert all("own backward (Scan)" in str(row.reason) for row in failed)
    passed = {row.runtime for row in report.results if row.way == "autograd"}
    assert passed == {"torchscript"}  # the artifact is right


def test_what_is_missing_without_the_option_says_so(tmp_path: Path) -> None:
    file, checkpoint = written(tmp_path, CODE)
    inputs = parse_inputs(["x:[1,3,4]"])
    with pytest.raises(Missing, match=r"a stand-in for selective_scan_cuda: --shim auto"):
        api.export(checkpoint, tmp_path / "b", model=f"{file}:Net", inputs=inputs)
    with pytest.raises(UsageError, match="give --model too"):
        api.export(checkpoint, tmp_path / "b", shim="auto")
    with pytest.raises(UsageError, match="no such stand-in"):
        api.export(checkpoint, tmp_path / "b", model=f"{file}:Net", shim="flash")
