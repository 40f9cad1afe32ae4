"""Integers that loops over dynamic sizes carry from turn to turn, beside what has gradients."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan

from fuseport.exporter import api
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.program import TensorSpec
from fuseport.exporter.program.complex_numbers.real_regions import differentiable
from fuseport.exporter.program.conditions import admits, forget, violated
from fuseport.exporter.program.forward import capture_forward

SavedNet = Callable[[str], tuple[nn.Module, Path, str]]

HEAD = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 3)

    def forward(self, x):
        batch, length, _ = x.shape
        h = torch.zeros(batch, 3)
"""

FORMS = {
    "counted": """
        count = torch.zeros(batch, dtype=torch.int64)
        for t in range(length):
            h = torch.tanh(self.a(h) + x[:, t])
            count = count + (h[:, 0] > 0)
        return h * count[:, None], count
""",
    "that decide": """
        best, seen, kept = torch.full((batch,), -7), torch.zeros(batch, 3, dtype=torch.bool), []
        for t in range(length):
            h = torch.tanh(self.a(h) + x[:, t]) * (1 + best[:, None] % 2)
            best = best + h.argmax(1) - 1
            seen = seen | (h > 0.5)
            h = h * torch.where(seen, 1.5, 0.5)
            kept.append(best)
        return h, torch.stack(kept, 1)
""",
    "numbered by hand": """
        number, total = 1, 0
        for row in x.unbind(1):
            h = torch.tanh(self.a(h) + row) / number
            total = total + (row > h).sum(-1)
            number += 1
        return h * total[:, None]
""",
    "that say which part": """
        table = self.a(torch.eye(3))
        for i in x[-1].argmax(1):
            h = torch.tanh(h + self.a.weight[i.item()] * table[(i - 1).item()]).to(x.dtype)
        return h
""",
}


@pytest.mark.parametrize("name", FORMS)
def test_gradients_go_past_integers(name: str, saved_net: SavedNet, tmp_path: Path) -> None:
    _, checkpoint, code = saved_net(HEAD + FORMS[name])
    inputs = parse_inputs(["x:[batch,length,3]"])
    bundle = api.export(checkpoint, tmp_path / "b", model=code, inputs=inputs)
    report = api.verify(bundle.folder, model=code)
    assert report.exit_code(strict=True) == 0, report.failures()


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        (torch.int64, [-(2**63), -(2**53) - 1, -1, 0, 1, 2**32, 2**62 + 1, 2**63 - 1]),
        (torch.int32, [-(2**31), -1, 2**31 - 1]),
        (torch.uint8, [0, 1, 255]),
        (torch.bool, [False, True]),
    ],
)
def test_integers_keep_their_values(dtype: torch.dtype, values: list[int]) -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor, first: Tensor) -> tuple[Tensor, ...]:
            def step(carry: tuple[Tensor, Tensor], row: Tensor) -> Any:
                h, numbers = carry
                return (h * row, numbers.flip(0)), numbers.clone()

            (h, last), all_of_them = scan(step, (torch.ones(2), first), x)
            return h, last, all_of_them

    x, first = torch.rand(5, 2) + 0.5, torch.tensor(values, dtype=dtype)
    specs = [
        TensorSpec("x", "float32", ("length", 2)),
        TensorSpec("first", str(dtype).removeprefix("torch."), tuple(first.shape)),
    ]
    exported = capture_forward(Net(), {"x": x, "first": first}, specs).exported
    program = differentiable(exported)
    assert program is not exported
    for length in (1, 4, 5):
        part, wanted = (x[:length].clone().requires_grad_() for _ in range(2))
        h, last, all_of_them = program.module()(part, first).values()
        h.sum().backward()
        wanted.prod(0).sum().backward()
        torch.testing.assert_close(part.grad, wanted.grad)
        assert {last.dtype, all_of_them.dtype} == {dtype}
        assert torch.equal(last, first.flip(0) if length % 2 else first)
        assert torch.equal(all_of_them[0], first)


def test_a_loop_of_no_turn_is_not_admitted() -> None:
    """Whatever is let go of: torch has such loops from 2.14 on, and no artifact has."""

    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            def step(h: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
                return h * row, row.clone()

            return scan(step, x[0].clone(), x[1:])[0]

    spec = TensorSpec("x", "float32", ("length", 2))
    program = capture_forward(Net(), {"x": torch.rand(5, 2)}, [spec])
    back = forget(program, {"length": 1})
    assert not admits(program, {"length": 1})
    assert [str(each) for each in violated(program, {"length": 1})] == ["length - 1 >= 1"]
    assert admits(program, {"length": 2})
    back()


def test_a_program_without_such_integers_stays_as_it_is() -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.argmax(1) * x.sum(1)

    exported = torch.export.export(Net(), (torch.rand(3, 2),))
    assert differentiable(exported) is exported
