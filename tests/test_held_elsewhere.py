"""Parameters, buffers and views of them that a model's code has elsewhere, too."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuseport.exporter import api
from fuseport.exporter.models import _views
from fuseport.exporter.models.fresh import fresh
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


VIEWS = """
import torch

class Part(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.held = {"turned": [weight.T, 3], "row": (weight[1], "of it")}

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(3, 3)
        self.part = Part(self.a.weight)
        self.flat = self.a.weight.view(-1)
        self.some = self.a.weight[:2, 1:]

    def forward(self, x):
        y = (x @ self.part.held["turned"][0]).tanh() * self.part.held["row"][0]
        return self.a(y) * self.flat.square().sum() + (y[:, :2] @ self.some.T).sum()
"""


def by_hand(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y = (x @ weight.T).tanh() * weight[1]
    return (y @ weight.T + bias) * weight.square().sum() + (y[:, :2] @ weight[:2, 1:].T).sum()


def test_views_of_parameters_have_their_values_and_gradients(
    tmp_path: Path, saved_with: SavedWith
) -> None:
    torch.manual_seed(0)
    a, x, seed = nn.Linear(3, 3), torch.randn(4, 3), torch.randn(4, 3)
    checkpoint, model = saved_with(VIEWS, a=a)
    bundle = api.export(checkpoint, tmp_path / "b", model=model, inputs="x:[n,3]")
    expected = by_hand(x, a.weight, a.bias)
    wanted = torch.autograd.grad(expected, [a.weight, a.bias], seed)
    found = torch.jit.load(bundle.folder / "gradient.pt")(x, seed)
    names = "output", "grad/a.weight", "grad/a.bias"
    for name, value in zip(names, (expected, *wanted), strict=True):
        torch.testing.assert_close(found[name], value)
    report = api.verify(bundle.folder, model=model)
    assert report.exit_code() == 0, report.failures()


@pytest.mark.parametrize(("dtype", "shim"), [("float64", ()), ("float32", "auto")])
def test_views_are_of_weights_of_another_dtype_and_beside_stand_ins(
    dtype: str, shim: Any, tmp_path: Path, saved_with: SavedWith
) -> None:
    torch.manual_seed(0)
    a = nn.Linear(3, 3).to(getattr(torch, dtype))
    x, seed = torch.randn(2, 4, 3, dtype=a.weight.dtype)
    checkpoint, model = saved_with(VIEWS, a=a)
    words = {"inputs": f"x:{dtype}[n,3]", "format": "torchscript", "shim": shim}
    bundle = api.export(checkpoint, tmp_path / "b", model=model, **words)
    expected = by_hand(x, a.weight, a.bias)
    (wanted,) = torch.autograd.grad(expected, [a.weight], seed)
    found = torch.jit.load(bundle.folder / "gradient.pt")(x, seed)
    torch.testing.assert_close(found["output"], expected)
    torch.testing.assert_close(found["grad/a.weight"], wanted)


def test_a_copy_has_views_of_its_own_parameters() -> None:
    scope: dict[str, Any] = {}
    exec(VIEWS, scope)
    module = scope["Net"]()
    kept = module.part.held, module.flat, module.some
    _views.renew(module)
    x = torch.randn(4, 3)
    copied = fresh(module).double()
    with torch.no_grad():
        copied.a.weight.mul_(2)
    for each in (module, copied):
        expected = by_hand(x.to(each.a.weight), each.a.weight, each.a.bias)
        torch.testing.assert_close(each(x.to(expected)), expected)
    assert inspect.signature(copied.forward) == inspect.signature(scope["Net"]().forward)
    now = module.part.held, module.flat, module.some
    assert all(after is before for after, before in zip(now, kept, strict=True))


PACKED = """
import torch

class Packed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.randn(4))
        self.whole = torch.randint(-8, 8, (4, 3), dtype=torch.int8)

    def state_dict(self, *args, destination, prefix, keep_vars):
        super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        destination[f"{prefix}weight.whole"] = self.whole
        destination[f"{prefix}rows"] = torch.tensor(len(self.whole))

    def _load_from_state_dict(self, state, prefix, *others):
        self.whole = state.pop(f"{prefix}weight.whole").view(state.pop(f"{prefix}rows").item(), -1)
        super()._load_from_state_dict(state, prefix, *others)

    def forward(self, x):
        return x @ self.whole.to(x.dtype).T + self.bias

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.packed = torch.nn.Linear(3, 3), Packed()

    def forward(self, x):
        return self.packed(self.first(x).tanh())
"""


def test_what_a_layer_saves_by_code_of_its_own_it_loads(
    saved_net: Callable[[str], tuple[nn.Module, Path, str]], tmp_path: Path
) -> None:
    """As HQQ's and quanto's layers have the parts of a quantized weight."""
    module, checkpoint, code = saved_net(PACKED)
    bundle = api.export(checkpoint, tmp_path / "b", model=code, inputs="x:[n,3]")
    x = torch.randn(5, 3)
    found = torch.jit.load(bundle.folder / "forward.pt")(x)
    torch.testing.assert_close(found, module(x))
    report = api.verify(bundle.folder, model=code)
    assert report.exit_code() == 0, report.failures()
