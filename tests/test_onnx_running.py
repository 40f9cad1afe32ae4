"""Largest values so far and exponentials of matrices in ONNX, at sizes unlike the export's."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan

from fuseport.exporter.program import TensorSpec
from fuseport.exporter.program.forward import capture_forward
from fuseport.exporter.program.gradient import capture_gradient
from fuseport.tests.as_files import session_of

SIX = torch.tensor([1.0, 3, -2, 0.5, -4, 4])
NAN = torch.tensor([1.0, torch.nan, 3, torch.nan, torch.inf, -torch.inf])

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "cummax": lambda x: x.cummax(1)[0],
    "cummax from behind, of equals": lambda x: (x + (3 * x).round()).cummax(-2)[0] * 2,
    "cummin of a batch": lambda x: torch.cummin(x, 0)[0],
    "cummin of a size that is a number": lambda x: (x[..., None] * SIX).cummin(3)[0],
    "places": lambda x: x * (2 * x).round().cummax(1)[1] + x * (2 * x).round().cummin(2).indices,
    "integers": lambda x: x * (9 * x).long().cummax(2)[0] + x * (x > 1).cummax(1)[0],
    "NaN": lambda x: (
        x[..., None] + torch.stack([NAN.cummax(0)[0].isnan().long(), NAN.cummin(0)[1]]).sum(0)
    ),
    "rank 0": lambda x: x.sum().cummax(0)[0] + x,
    "matrix_exp": lambda x: torch.matrix_exp(x),
    "matrix_exp of small ones": lambda x: torch.linalg.matrix_exp(x * 1e-3) - 1,
    "matrix_exp of large ones": lambda x: torch.matrix_exp((x - x.mT) * 40),
    "matrix_exp of a product": lambda x: torch.matrix_exp(x[0] @ x[0].mT * -2) @ x,
    "matrix_exp of a number": lambda x: torch.matrix_exp(x[:, :1, :1]) + x,
}


class Called(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


CASES = [
    *((name, torch.float32) for name in FUNCTIONS),
    *((name, torch.float64) for name in FUNCTIONS if name.startswith("matrix")),
]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_outputs_and_gradients_are_those_of_float64(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(7)
    net = Called(FUNCTIONS[name])
    spec = TensorSpec("x", str(dtype).removeprefix("torch."), ("batch", "n", "n"))
    example = torch.randn(2, 5, 5, dtype=dtype, generator=generator)
    forward = capture_forward(net, {"x": example}, [spec])
    sessions: dict[str, Any] = {}
    for program in (forward, capture_gradient(forward)):
        sessions[program.kind] = session_of(program, tmp_path, "onnxruntime")
    near = {"rtol": 1e-9, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    for batch, size in (2, 5), (1, 3), (3, 8), (1, 1):
        x = torch.randn(batch, size, size, dtype=dtype, generator=generator)
        exact = x.double().requires_grad_()
        y = copy.deepcopy(net)(exact)
        cotangent = torch.randn(y.shape, dtype=torch.float64, generator=generator).to(dtype)
        (dx,) = torch.autograd.grad(y, exact, cotangent.double())
        out = sessions["forward"].run({"x": x})["output"]
        torch.testing.assert_close(out, y.detach().to(dtype), equal_nan=True, **near)
        found = sessions["gradient"].run({"x": x, "cotangent_output": cotangent})
        torch.testing.assert_close(found["grad/x"], dx.to(dtype), equal_nan=True, **near)


def test_branches_and_turns_of_loops_have_the_same_forms(tmp_path: Path) -> None:
    def turn(so_far: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        found = (so_far / 2 + x).cummax(-1)[0]
        return found, torch.lgamma(found.abs() + 1) + torch.linalg.inv(found + 3 * torch.eye(3))

    def function(x: Tensor) -> Tensor:
        ys: Any = scan(turn, torch.eye(3), x)[1]
        return torch.cond(
            x.sum() > 0, lambda y: y.cummin(1)[0], lambda y: torch.matrix_exp(y / 9), (ys,)
        )

    generator = torch.Generator().manual_seed(8)
    spec = TensorSpec("x", "float32", ("length", 3, 3))
    example = torch.rand(4, 3, 3, generator=generator)
    program = capture_forward(Called(function), {"x": example}, [spec])
    session = session_of(program, tmp_path, "onnxruntime")
    for length, sign in (4, 1), (7, -1), (1, 1):
        x = sign * torch.rand(length, 3, 3, generator=generator)
        found = session.run({"x": x})["output"]
        torch.testing.assert_close(found, function(x), rtol=1e-4, atol=1e-4)
