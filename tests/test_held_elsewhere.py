"""Parameters and buffers that a model's code has in a list of its own, too."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from fuseport.exporter import api
from fuseport.exporter.models.user import parse_inputs

SavedWith = Callable[..., tuple[Path, str]]

NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        self.norm = torch.nn.BatchNorm1d(3)
        self.held = {"weights": [self.a.weight, self.b.weight], "mean": (self.norm.running_mean,)}
        self.apart = [self.b.weight.detach()]

    def forward(self, x):
        for weight in self.held["weights"]:
            x = (x @ weight).tanh()
        x = self.norm(x + self.a.bias + self.b.bias) + self.held["mean"][0]
        return x * (x @ self.apart[0])
"""


def test_they_have_the_weights_of_the_checkpoint_and_gradients(
    tmp_path: Path, saved_with: SavedWith
) -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(3)
    norm(torch.randn(16, 3) + 2)
    a, b = nn.Linear(3, 3), nn.Linear(3, 3)
    checkpoint, model = saved_with(NET, a=a, b=b, norm=norm)
    bundle = api.export(checkpoint, tmp_path / "b", model=model, inputs=parse_inputs(["x:[n,3]"]))
    x = torch.randn(4, 3)
    expected = ((x @ a.weight).tanh() @ b.weight).tanh() + a.bias + b.bias
    expected = norm.eval()(expected) + norm.running_mean
    expected = expected * (expected @ b.weight)
    found = torch.jit.load(bundle.folder / "forward.pt")(x)
    torch.testing.assert_close(found, expected)
    program = torch.export.load(bundle.folder / "forward.pt2")
    taken = {spec.target for spec in program.graph_signature.input_specs}
    assert program.constants.keys() <= taken
    report = api.verify(bundle.folder, model=model)
    assert report.exit_code() == 0, report.failures()
    gradients = {r.tensor for r in report.results if r.runtime == "onnxruntime"}
    assert {"grad/a.weight", "grad/b.weight"} <= gradients


VIEW = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(3, 3)
        self.held = {"turned": [self.a.weight.T]}

    def forward(self, x):
        return self.a(x) + x @ self.held["turned"][0]
"""


def test_a_view_of_a_parameter_has_the_weights_of_the_checkpoint(
    tmp_path: Path, saved_with: SavedWith
) -> None:
    torch.manual_seed(0)
    a, x = nn.Linear(3, 3), torch.randn(4, 3)
    checkpoint, model = saved_with(VIEW, a=a)
    inputs, wanted = parse_inputs(["x:[n,3]"]), ["torchscript"]
    bundle = api.export(
        checkpoint, tmp_path / "b", model=model, inputs=inputs, format=wanted, programs="forward"
    )
    found = torch.jit.load(bundle.folder / "forward.pt")(x)
    torch.testing.assert_close(found, a(x) + x @ a.weight.T)
