"""Model code that sets torch's default dtype: programs run where it is another one."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from fuseport.exporter import api
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.program import TensorSpec
from fuseport.exporter.program.forward import capture_forward
from fuseport.exporter.program.gradient import capture_gradient

CODE = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.set_default_dtype(torch.float64)
        self.a = torch.nn.Linear(3, 4, dtype=torch.float32)

    def forward(self, x, counts):
        made = torch.linspace(0.1, 0.7, 4) + torch.eye(x.shape[0], 4)
        shares = torch.sqrt(counts / 7) + torch.where(counts > 3, 0.1, 0.3) + counts * 0.3
        shares = shares + torch.where(counts > 5, counts, 0.7)
        double = self.a(x).double() * made
        if double.shape[0] > 1:
            double = double - torch.zeros(4)
        for row in x:
            double = double + torch.full((4,), 0.1)
        return double @ torch.ones(4), shares
"""


@pytest.fixture(autouse=True)
def default() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


def test_programs_have_the_default_dtype_of_the_models_code(
    tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    torch.manual_seed(5)
    checkpoint, model = saved_with(CODE, a=nn.Linear(3, 4))
    inputs = parse_inputs(["x:[batch,3]", "counts:int64[batch]<9"])
    bundle = api.export(checkpoint, tmp_path / "b", model=model, inputs=inputs)
    report = api.verify(bundle.folder, model=model)
    assert report.exit_code() == 0, report.failures()
    assert report.summary["unsupported"] == 0


class Made(nn.Module):
    def forward(self, x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        shares = n / 3 + torch.exp(n) + torch.where(n > 0, 0.1, 0.3)
        return x * torch.linspace(0, 1, 3) + shares[:, None]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_nothing_in_programs_hangs_on_the_default_where_they_run(dtype: torch.dtype) -> None:
    x, n = torch.ones(2, 3), torch.arange(2)
    specs = [TensorSpec("x", "float32", ("b", 3)), TensorSpec("n", "int64", ("b",))]
    forward = capture_forward(Made(), {"x": x, "n": n}, specs)
    gradient = capture_gradient(forward)
    expected = Made()(x, n), gradient.exported.module()(x, n, torch.ones(2, 3))
    torch.set_default_dtype(dtype)
    torch.testing.assert_close(forward.exported.module()(x, n), expected[0], rtol=0, atol=0)
    found = gradient.exported.module()(x, n, torch.ones(2, 3, dtype=torch.float32))
    torch.testing.assert_close(found, expected[1], rtol=0, atol=0)
