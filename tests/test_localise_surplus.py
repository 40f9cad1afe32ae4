"""Artifacts that give gradients where the model has none are diagnosed, and in plain words."""

import hashlib
from pathlib import Path

import onnx
import pytest
import torch
from click.testing import CliRunner
from onnx import TensorProto, helper
from torch import Tensor, nn

from fuseport.cli import main
from fuseport.exporter import api
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.verify.report import Report

CODE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.online, self.target = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.online(x) * self.target(x.detach()).tanh().detach()
"""
SURPLUS = "grad/target.weight"


class Attached(nn.Module):
    """The same without the second `detach`, or without either."""

    def __init__(self, of_parameters_only: bool) -> None:
        super().__init__()
        self.of_parameters_only = of_parameters_only
        self.online, self.target = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        there = x.detach() if self.of_parameters_only else x
        product: Tensor = self.online(x) * self.target(there).tanh()
        return product


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("surplus")
    (folder / "net.py").write_text(CODE)
    generator = torch.Generator().manual_seed(0)
    state = {
        f"{layer}.{name}": torch.randn(shape, generator=generator)
        for layer in ("online", "target")
        for name, shape in (("weight", (4, 4)), ("bias", (4,)))
    }
    torch.save(state, folder / "net.pth")
    return api.export(
        folder / "net.pth",
        folder / "bundle",
        inputs=parse_inputs(["x:[batch,4]"]),
        format=("onnx", "torchscript"),
        model=f"{folder / 'net.py'}:Net",
    ).folder


def verified(bundle: Path, file: Path, runtimes: list[str], *options: str) -> Report:
    """The report of one artifact, which is wrong."""
    given = [f"--runtime={name}" for name in runtimes]
    code = f"--model={bundle.parent / 'net.py'}:Net"
    run = CliRunner().invoke(
        main, ["verify", str(bundle), code, f"--artifact={file}", *given, "--json=-", *options]
    )
    assert run.exit_code == 1, run.output
    return Report.from_json(run.stdout)


def test_a_gradient_of_an_onnx_file_that_the_model_has_not(bundle: Path, tmp_path: Path) -> None:
    file = tmp_path / "gradient.onnx"
    model = onnx.load(bundle / "gradient.onnx")
    model.graph.node.append(helper.make_node("Identity", ["grad/online.weight"], [SURPLUS]))
    model.graph.output.append(helper.make_tensor_value_info(SURPLUS, TensorProto.FLOAT, [4, 4]))
    onnx.save(model, file)
    report = verified(bundle, file, ["onnxruntime", "onnx_reference"])
    assert {row.tensor for row in report.results if row.verdict == "fail"} == {SURPLUS}
    assert len(report.diagnoses) == 2
    for diagnosis in report.diagnoses:
        assert diagnosis.cause == "export", diagnosis.reason
        assert "is wrong in onnx" in diagnosis.reason
        assert f"it gives {SURPLUS}, of which the model's program has no value" in diagnosis.reason


@pytest.mark.parametrize(
    ("of_parameters_only", "said"),
    [
        (True, f"it gives {SURPLUS}, grad/target.bias, of which the model's program has no value"),
        (False, "the model's program, written anew over the weights of forward.pt, is right"),
    ],
)
def test_autograd_of_torchscript_that_lost_a_detach(
    of_parameters_only: bool, said: str, bundle: Path, tmp_path: Path
) -> None:
    """It is not said to begin where a search of the model's own program comes to an end."""
    module = Attached(of_parameters_only)
    module.load_state_dict(torch.load(bundle.parent / "net.pth"))
    file = tmp_path / "forward.pt"
    torch.jit.script(module).save(str(file))
    trust = f"--trust-native={hashlib.sha256(file.read_bytes()).hexdigest()}"
    report = verified(bundle, file, ["torchscript"], trust)
    wrong = {r.tensor for r in report.results if r.verdict == "fail" and r.way == "autograd"}
    assert wrong == {SURPLUS, "grad/target.bias", *([] if of_parameters_only else ["grad/x"])}
    (diagnosis,) = report.diagnoses
    assert diagnosis.cause == "export", diagnosis.reason
    assert diagnosis.divergence is None
    assert said in diagnosis.reason
