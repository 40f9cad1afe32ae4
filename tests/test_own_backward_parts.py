"""Autograd functions that write into what is one view of several, or compute into `out`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fuseport.exporter import api
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.user_code import own_backward
from fuseport.exporter.verify.report import OWN_BACKWARD

TURNED = """
import torch

class Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, by):
        ctx.save_for_backward(by)
        a, b = x.chunk(2, -1)
        a.mul_(by)
        b.div_(by)
        return x

    @staticmethod
    def backward(ctx, dy):
        (by,) = ctx.saved_tensors
        a, b = dy.chunk(2, -1)
        return torch.cat([a * by, b / by], -1), None

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(8, 8)

    def forward(self, x):
        turned, other = self.a(x).{parts}
        other = other * 3
        return Turn.apply(turned.view(-1, 4), torch.full((), 0.5)) * other
"""


@pytest.mark.parametrize(
    "parts", ["split(4, -1)", "chunk(2, -1)", "unflatten(-1, (2, 4)).unbind(-2)"]
)
def test_a_forward_may_write_into_what_is_a_part(
    parts: str, tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    """As TinyLlama's rotary embedding does, of a projection that its caller has split."""
    checkpoint, model = saved_with(TURNED.format(parts=parts), a=torch.nn.Linear(8, 8))
    inputs = parse_inputs(["x:[batch,8]"])
    bundle = api.export(checkpoint, tmp_path / "b", model=model, inputs=inputs)
    report = api.verify(bundle.folder, model=model, runtime=["eager", "torchscript"])
    assert report.exit_code() == 0, report.failures()
    assert any(row.way == OWN_BACKWARD for row in report.results)


@pytest.mark.parametrize(("line", "copies"), [("y = x * 2", 0), ("x *= 2; y = x", 1)])
def test_a_part_is_copied_where_a_forward_writes_into_it(line: str, copies: int) -> None:
    names: dict[str, Any] = {}
    exec(  # a function of its own, not of these tests'
        "import torch\n"
        "class Doubled(torch.autograd.Function):\n"
        "    @staticmethod\n"
        "    def forward(ctx, x):\n"
        f"        {line}\n"
        "        return y\n",
        names,
    )

    class Net(torch.nn.Module):
        def forward(self, x: Tensor) -> Any:
            left, right = (x * 1).chunk(2, -1)
            return names["Doubled"].apply(left), right

    with own_backward.inlined():
        exported = torch.export.export(Net(), (torch.ones(2, 4),), strict=False)
    targets = [str(node.target) for node in exported.graph.nodes]
    assert targets.count("aten.clone.default") == copies
    left, right = exported.module()(torch.ones(2, 4))
    assert torch.equal(left, torch.full((2, 2), 2.0))
    assert torch.equal(right, torch.ones(2, 2))


INTO = """
import torch

class Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        out = torch.empty(x.shape[0], 2, 4).transpose(0, 1)
        out = torch.bmm(x.view(-1, 2, 4).transpose(0, 1), weight, out=out)
        best, at = torch.empty(2, 0), torch.empty(2, 0, dtype=torch.int64)
        if {resized}:
            best, at = torch.empty(2, x.shape[0]), torch.empty(2, x.shape[0], dtype=torch.int64)
        torch.max({values}, -1, out=(best, at))
        return (out * best[..., None]).transpose(0, 1).reshape(-1, 8)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        with torch.enable_grad():
            x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
            out = torch.bmm(x.view(-1, 2, 4).transpose(0, 1), weight)
            out = out * {again}.amax(-1)[..., None]
            out = out.transpose(0, 1).reshape(-1, 8)
            return torch.autograd.grad(out, (x, weight), dy)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(4, 8)

    def forward(self, x):
        return Multiply.apply(x, self.a.weight.view(2, 4, 4))
"""


def test_a_forward_may_compute_into_what_it_has_made(
    tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    """As M2-BERT's products of blocks do, which autograd refuses of what it differentiates."""
    code = INTO.format(resized=True, values="out", again="out")
    checkpoint, model = saved_with(code, a=torch.nn.Linear(4, 8))
    bundle = api.export(checkpoint, tmp_path / "b", model=model, inputs="x:[batch,8]")
    report = api.verify(bundle.folder, model=model, runtime=["eager", "torchscript"])
    assert report.exit_code() == 0, report.failures()
    assert {row.way for row in report.results} >= {OWN_BACKWARD}


def test_out_that_torch_would_make_larger_is_left_to_torch() -> None:
    names: dict[str, Any] = {}
    exec(INTO.format(resized=False, values="out.detach()", again="out"), names)
    module = names["Net"]().eval()
    with torch.no_grad():
        expected = module(torch.ones(3, 8))
        with own_backward.inlined():
            assert torch.equal(module(torch.ones(3, 8)), expected)
