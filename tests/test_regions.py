"""A model with torch.cond in it: exported and verified whole, but for forms that torch lacks."""

from pathlib import Path

import torch

from fuseport.exporter import api
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.program.backward_forms import FORMS, TRACED_AGAIN
from fuseport.exporter.verify.report.untried import untried

NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(3, 3)

    def forward(self, x):
        return torch.cond(x.sum() > 0, torch.sin, lambda y: (2 * y).cos(), (self.a(x),))
"""


def test_gradients_go_through_a_branch(tmp_path: Path) -> None:
    code = tmp_path / "net.py"
    code.write_text(NET)
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 3)
    torch.save({f"a.{name}": p for name, p in layer.state_dict().items()}, tmp_path / "net.pt")
    model = f"{code}:Net"
    bundle = api.export(
        tmp_path / "net.pt",
        tmp_path / "b",
        model=model,
        inputs=parse_inputs(["x:[batch,length,3]"]),
        format=["exported_program", "onnx"],
    )
    report = api.verify(bundle.folder, model=model)
    assert report.exit_code() == 0, report.failures()
    passed = [row for row in report.results if row.verdict == "pass"]
    gradients = {row.runtime for row in passed if row.tensor == "grad/a.bias"}
    assert {"eager", "exported_program", "onnxruntime", "onnx_reference"} <= gradients
    for runtime in ("eager", "exported_program"):
        rows = [row for row in report.results if row.runtime == runtime]
        asked = {row.tensor for row in rows if row.way == "autograd forms"}
        assert asked == set(FORMS) - set(TRACED_AGAIN), runtime
    told = [absent for absent in untried(report.results) if absent.forms == TRACED_AGAIN]
    assert [absent.short for absent in told] == ["torch.cond or scan"]
