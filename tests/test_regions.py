"""Branches and loops in a graph, torch's cond, scan and map: exported, verified, in TorchScript."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan

from fuseport.exporter import api
from fuseport.exporter.formats import Options, torchscript
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.program import TensorSpec
from fuseport.exporter.program.backward_forms import FORMS, TRACED_AGAIN
from fuseport.exporter.program.forward import capture_forward
from fuseport.exporter.program.gradient import capture_gradient
from fuseport.exporter.verify.report.untried import untried

SavedWith = Callable[..., tuple[Path, str]]

NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(3, 3)

    def forward(self, x):
        return torch.cond(x.sum() > 0, torch.sin, lambda y: (2 * y).cos(), (self.a(x),))
"""


def test_gradients_go_through_a_branch(tmp_path: Path, saved_with: SavedWith) -> None:
    torch.manual_seed(0)
    checkpoint, model = saved_with(NET, a=nn.Linear(3, 3))
    inputs = parse_inputs(["x:[batch,length,3]"])
    bundle = api.export(checkpoint, tmp_path / "b", model=model, inputs=inputs)
    report = api.verify(bundle.folder, model=model)
    assert report.exit_code() == 0, report.failures()
    passed = [row for row in report.results if row.verdict == "pass"]
    gradients = {row.runtime for row in passed if row.tensor == "grad/a.bias"}
    assert {"eager", "exported_program", "torchscript", "onnxruntime", "libtorch"} <= gradients
    for runtime in ("eager", "exported_program"):
        rows = [row for row in report.results if row.runtime == runtime]
        asked = {row.tensor for row in rows if row.way == "autograd forms"}
        assert asked == set(FORMS) - set(TRACED_AGAIN), runtime
    told = [absent for absent in untried(report.results) if absent.forms == TRACED_AGAIN]
    assert [absent.short for absent in told] == ["torch.cond or scan"]


COMPILED = """
import torch

@torch.compile(backend="aot_eager")
def mixed(x, weight):
    return (x @ weight).sin().sum(-1, keepdim=True) * x

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(3, 3)

    def forward(self, x):
        return mixed(self.a(x), self.a.weight)
"""


def test_what_model_code_compiles_is_exported_and_differentiated(
    tmp_path: Path, saved_with: SavedWith
) -> None:
    torch.manual_seed(0)
    checkpoint, model = saved_with(COMPILED, a=nn.Linear(3, 3))
    inputs, wanted = parse_inputs(["x:[batch,length,3]"]), ["torchscript"]
    bundle = api.export(checkpoint, tmp_path / "b", model=model, inputs=inputs, format=wanted)
    report = api.verify(bundle.folder, model=model, runtime=["eager", "torchscript"])
    assert report.exit_code() == 0, report.failures()
    forms = {r.tensor for r in report.results if (r.runtime, r.way) == ("eager", "autograd forms")}
    assert "again through a retained graph" in forms


SCANNED = """
import torch
from torch._higher_order_ops.scan import scan

def step(h, y):
    gate, new = y.split(3, -1)
    h = torch.maximum(h * gate, new) * new  # whose derivative writes in place, and needs the parts
    return h, h / (2 + h * h)  # and this one's what is left

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(3, 6)

    def forward(self, x):
        steps = self.a(x).transpose(0, 1).contiguous()
        _, outputs = scan(step, x.new_zeros(x.shape[0], 3), steps)
        return outputs.transpose(0, 1)
"""


def test_gradients_go_through_what_a_scan_s_step_needs_of_itself(
    tmp_path: Path, saved_with: SavedWith
) -> None:
    torch.manual_seed(0)
    checkpoint, model = saved_with(SCANNED, a=nn.Linear(3, 6))
    inputs, wanted = parse_inputs(["x:[batch,length,3]"]), ["onnx", "torchscript"]
    bundle = api.export(checkpoint, tmp_path / "b", model=model, inputs=inputs, format=wanted)
    runtimes = ["eager", "onnxruntime", "torchscript"]
    report = api.verify(bundle.folder, model=model, runtime=runtimes)
    assert report.exit_code() == 0, report.failures()
    passed = {r.runtime for r in report.results if (r.tensor, r.verdict) == ("grad/a.bias", "pass")}
    assert passed >= {*runtimes}


def recurrence(x: Tensor) -> Tensor:
    def step(h: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.cond(y.sum() > 0, lambda h, y: (h + y).sin(), lambda h, y: h * y, (h, y))
        return h, 2 * h

    last, outputs = scan(step, x.new_zeros(x.shape[0], 3), x.transpose(0, 1).contiguous())
    return outputs.transpose(0, 1) + last[:, None]


IN_TORCHSCRIPT: dict[str, Callable[[Tensor], Tensor]] = {
    "a branch by a size": lambda x: torch.cond(
        x.shape[1] > 6, lambda y: y * x.shape[0], lambda y: y.sin(), (x,)
    ),
    "a branch by a value, in a branch": lambda x: torch.cond(
        x.sum() > 0,
        torch.sin,
        lambda y: torch.cond(y.sum() < -1, torch.cos, lambda z: z**3, (y,)),
        (x * 2,),
    ),
    "a branch in a scan": recurrence,
    "a map": lambda x: torch_map(lambda row, mean: (row * mean).sin(), x, x.mean()),
}


@pytest.mark.parametrize("name", IN_TORCHSCRIPT)
def test_torchscript_has_branches_and_loops(name: str, tmp_path: Path) -> None:
    class Called(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return IN_TORCHSCRIPT[name](x)

    torch.manual_seed(0)
    spec = TensorSpec("x", "float32", ("batch", "length", 3))
    forward = capture_forward(Called(), {"x": torch.randn(2, 5, 3)}, [spec])
    for program in (forward, capture_gradient(forward)):
        torchscript.write(program, tmp_path / f"{program.kind}.pt", Options(tmp_path / "w"))
    module, gradient = (torch.jit.load(tmp_path / f"{k}.pt") for k in ("forward", "gradient"))
    for sizes in ((2, 5, 3), (1, 9, 3), (3, 2, 3), (4, 7, 3)):
        x = torch.randn(sizes, requires_grad=True)
        y = IN_TORCHSCRIPT[name](x)
        dy = torch.randn_like(y)
        (dx,) = torch.autograd.grad(y, x, dy)
        found = module(x)
        torch.testing.assert_close(found, y)
        torch.testing.assert_close(torch.autograd.grad(found, x, dy)[0], dx)
        results = gradient(x.detach(), dy)
        torch.testing.assert_close(results["output"], y.detach())
        torch.testing.assert_close(results["grad/x"], dx)


class Carrying(nn.Module):
    """Two of what a loop leaves have one cotangent, and are no two of a kind."""

    def forward(self, x: Tensor) -> Tensor:
        def step(states: tuple[Tensor, ...], row: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
            a, b, c = states
            return (a.tanh() * 0.9 + row, b * 0.5 + a.sin(), c + b), a.sin()

        (a, _, c), _ = scan(step, (x[0] * 1, x[0].sin(), x[0].cos()), x)
        return a + c


def test_each_state_of_a_loop_has_a_cotangent_of_its_own() -> None:
    x, cotangent = torch.randn(3, 4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    spec = TensorSpec("x", "float64", ("length", 4))
    gradient = capture_gradient(capture_forward(Carrying(), {"x": x}, [spec]))
    x.requires_grad_()
    a, b, c = x[0], x[0].sin(), x[0].cos()
    for row in x:
        a, b, c = a.tanh() * 0.9 + row, b * 0.5 + a.sin(), c + b
    (expected,) = torch.autograd.grad(a + c, x, cotangent)
    found = gradient.exported.module()(x.detach(), cotangent)["grad/x"]
    torch.testing.assert_close(found, expected)
