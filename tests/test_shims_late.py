"""Model code that imports CUDA-only packages when it is called: export, verify and bench."""

import copy
import sys
from pathlib import Path

import pytest
import torch

from fuseport.exporter import api, models, shims
from fuseport.exporter.checkpoint import load
from fuseport.exporter.errors import FuseportError
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.verify.report import OWN_BACKWARD

CODE = """
import torch
from torch import nn


class Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u, delta, A, B, C):
        import selective_scan_cuda
        out, x = selective_scan_cuda.fwd(u, delta, A, B, C, None, None, None, True)
        ctx.save_for_backward(u, delta, A, B, C, x, out)
        return out

    @staticmethod
    def backward(ctx, dout):
        import selective_scan_cuda as extension
        u, delta, A, B, C, x, out = ctx.saved_tensors
        found = extension.bwd(
            u, delta, A, B, C, None, None, None, dout, x, out, None, True, False
        )
        return tuple(found[:5])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(4, 4 + 4 + 2 + 2)
        self.A_log = nn.Parameter(torch.zeros(4, 2))

    def forward(self, x):
        from mamba_ssm.ops.selective_scan_interface import selective_scan_fn
        u, delta, B, C = (part.mT.contiguous() for part in self.proj(x).split([4, 4, 2, 2], -1))
        A = -self.A_log.exp()
        first = selective_scan_fn(u, delta, A, B, C, delta_softplus=True)
        return (first + Scan.apply(u, delta, A, B[:, None], C[:, None])).mT
"""
INPUTS = parse_inputs(["x:[batch,length,4]"])


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Weights, and `--model`."""
    folder = tmp_path_factory.mktemp("late")
    (folder / "late_net.py").write_text(CODE)
    torch.manual_seed(0)
    shapes = {"proj.weight": (12, 4), "proj.bias": (12,), "A_log": (4, 2)}
    torch.save({name: torch.randn(shape) for name, shape in shapes.items()}, folder / "w.pth")
    return folder / "w.pth", f"{folder / 'late_net.py'}:Net"


def test_it_exports_verifies_and_is_timed(theirs: tuple[Path, str], tmp_path: Path) -> None:
    weights, code = theirs
    bundle = api.export(
        weights, tmp_path / "b", model=code, inputs=INPUTS, shim="auto", format=["onnx"]
    )
    manifest = bundle.manifest
    # Nothing of them is imported with the file.
    assert manifest["architecture"]["config"]["shims"] == ["mamba_ssm", "selective_scan_cuda"]
    assert any("where the model is called" in note for note in manifest["notes"])
    assert "mamba_ssm" not in sys.modules
    runtimes = ["eager", "onnxruntime"]
    report = api.verify(bundle.folder, runtime=runtimes, model=code)
    assert report.exit_code(strict=True) == 0, report.failures()
    ways = {(row.runtime, row.program, row.way) for row in report.results}
    assert ("eager", "gradient", OWN_BACKWARD) in ways, "whose backward imports, too"
    bench = api.bench(bundle.folder, runtime=runtimes, model=code, rounds=1, program="forward")
    assert bench.results
    assert all(timing.reason is None and timing.ratio for timing in bench.results)


def test_the_module_and_its_copies_bring_the_stand_ins(theirs: tuple[Path, str]) -> None:
    weights, code = theirs
    model, _ = models.from_checkpoint(load(weights), code=code, inputs=INPUTS, shim=["auto"])
    x = torch.randn(2, 5, 4)
    expected = model.module(x)
    assert torch.equal(copy.deepcopy(model.module)(x), expected)
    wide = copy.deepcopy(model.module).double()
    torch.testing.assert_close(wide(x.double()).float(), expected)
    assert model.module(x).dtype == torch.float32, "its own weights, not those of the copy"
    with shims.installed():
        assert shims.active(["auto"])
        assert torch.equal(model.module(x), expected)
    assert not shims.active(["auto"])
    assert not {"mamba_ssm", "selective_scan_cuda"} & sys.modules.keys()


def test_without_the_option_it_is_named(theirs: tuple[Path, str], tmp_path: Path) -> None:
    weights, code = theirs
    with pytest.raises(FuseportError) as raised:
        api.export(weights, tmp_path / "b", model=code, inputs=INPUTS)
    said = "\n".join([str(raised.value), *raised.value.details])
    assert raised.value.exit_code == 5
    assert "mamba_ssm" in said
    assert "--shim auto" in said
