"""Autograd functions that write into what is one view of several."""

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
