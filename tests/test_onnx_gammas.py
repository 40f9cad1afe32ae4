"""Gamma and Bessel functions and modes in ONNX Runtime, and their gradients."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributions, nn
from torch.nn import functional as F

from fuseport.exporter.program import TensorSpec
from fuseport.exporter.program.forward import capture_forward
from fuseport.exporter.program.gradient import capture_gradient
from fuseport.tests.as_files import session_of

special = torch.special
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "lgamma": torch.lgamma,
    "gammaln": special.gammaln,
    "digamma": torch.digamma,
    "psi": special.psi,
    "polygamma 0": lambda x: special.polygamma(0, x),
    "polygamma 1": lambda x: torch.polygamma(1, x),
    "polygamma 2": lambda x: x.polygamma(2),
    "polygamma 5": lambda x: torch.polygamma(5, x),
    "mvlgamma": lambda x: torch.mvlgamma(x.abs() + 2, 4),
    "multigammaln": lambda x: special.multigammaln(x.abs() + 1.01, 3),
    "i0": torch.i0,
    "i0e": special.i0e,
    "i1": special.i1,
    "i1e": special.i1e,
    "erfinv": lambda x: torch.erfinv(torch.sin(x) * 0.9),
    "log of a beta distribution": lambda x: distributions.Beta(
        F.softplus(x) + 0.1, x.abs() + 1, validate_args=False
    ).log_prob(x.sigmoid() * 0.9 + 0.05),
    "entropy of a gamma distribution": lambda x: distributions.Gamma(
        F.softplus(x) + 0.1, x.abs() + 1, validate_args=False
    ).entropy(),
}
CASES = [
    *((name, torch.float32) for name in FUNCTIONS if "entropy" not in name),  # which cancels out
    *((name, torch.float64) for name in FUNCTIONS if name != "erfinv"),  # ONNX Runtime has no erf
    *((name, torch.float16) for name in ("lgamma", "digamma", "i0e")),
]


class Called(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def drawn(n: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Rows at three scales, and no number near to a pole."""
    x = torch.randn(3, n, dtype=torch.float64, generator=generator)
    x = x * torch.tensor([[0.5], [3], [25]])
    return torch.where((x - x.round()).abs() < 0.05, x.round() + 0.25, x).to(dtype)


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_outputs_and_gradients_are_torch_s(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(13)
    net = Called(FUNCTIONS[name])
    spec = TensorSpec("x", str(dtype).removeprefix("torch."), (3, "n"))
    forward = capture_forward(net, {"x": drawn(6, dtype, generator)}, [spec])
    sessions: dict[str, Any] = {}
    for program in (forward, capture_gradient(forward)):
        sessions[program.kind] = session_of(program, tmp_path, "onnxruntime")
    near = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3}[dtype]
    for n in (6, 1, 40):
        x = drawn(n, dtype, generator)
        exact = x.double().requires_grad_()
        y = net(exact)
        cotangent = torch.randn(y.shape, dtype=torch.float64, generator=generator).to(dtype)
        (dx,) = torch.autograd.grad(y, exact, cotangent.double())
        found = sessions["forward"].run({"x": x})["output"]
        assert_near(found, y.detach().to(dtype), near)
        given = {"x": x, "cotangent_output": cotangent}
        assert_near(sessions["gradient"].run(given)["grad/x"], dx.to(dtype), near)


def assert_near(found: Tensor, expected: Tensor, near: float) -> None:
    """Each to as many digits, but where it is nearly 0 for its row."""
    assert found.dtype == expected.dtype
    assert torch.equal(found.isinf(), expected.isinf())
    finite = expected.isfinite()
    found, expected = (torch.where(finite, each, 0).double() for each in (found, expected))
    allowed = near * (expected.abs() + 0.1 * expected.abs().amax(-1, keepdim=True))
    off = (found - expected).abs() > allowed
    assert not off.any(), (found[off], expected[off])


ODD = [0.0, -0.0, 1.0, 2.0, 3.0, 0.5, 1e-30, -1e-30, 7.999, 8.0, 20.0, 20.0001, 1e30, -1.0, -2.0]
ODD += [torch.inf, -torch.inf, torch.nan]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zeros_poles_and_what_is_not_finite_are_as_in_torch(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    def function(x: Tensor) -> dict[str, Tensor]:
        functions = {"lgamma", "digamma", "polygamma 2", "i0e", "i1e", "i0", "i1"}
        found = {name.replace(" ", "_"): FUNCTIONS[name](x) for name in sorted(functions)}
        return {**found, "polygamma_1": torch.polygamma(1, x.abs())}

    x = torch.tensor(ODD, dtype=dtype)
    spec = TensorSpec("x", str(dtype).removeprefix("torch."), ("n",))
    program = capture_forward(Called(function), {"x": x}, [spec])
    found = session_of(program, tmp_path, "onnxruntime").run({"x": x})
    assert found["lgamma"][2:4].tolist() == [0, 0]
    near = 2e-6 if dtype == torch.float32 else 1e-14
    for name, expected in function(x).items():
        torch.testing.assert_close(found[name], expected, rtol=near, atol=near, equal_nan=True)


def test_of_integers_results_are_real(tmp_path: Path) -> None:
    def function(x: Tensor) -> Tensor:
        return torch.lgamma(x) + torch.special.i0e(x) + torch.digamma(x + 1)

    spec = TensorSpec("x", "int64", ("n",), 9)
    program = capture_forward(Called(function), {"x": torch.arange(1, 5)}, [spec])
    x = torch.arange(1, 9)
    found = session_of(program, tmp_path, "onnxruntime").run({"x": x})["output"]
    torch.testing.assert_close(found, function(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_the_mode_is_the_smallest_of_what_is_most_often(dim: int, tmp_path: Path) -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values, places = x.round().mode(dim)
        kept = x.round().mode(dim, keepdim=True).values
        return values * x.sum(dim), places, kept + x.sum().mode().values

    generator = torch.Generator().manual_seed(4)
    spec = TensorSpec("x", "float32", ("a", "b", "c"))
    net = Called(lambda x: dict(zip("vpk", function(x), strict=True)))
    example = torch.randn(3, 4, 5, generator=generator)
    forward = capture_forward(net, {"x": example}, [spec])
    program = session_of(forward, tmp_path, "onnxruntime")
    for shape in (3, 4, 5), (1, 7, 2), (9, 1, 12):
        x = torch.randn(shape, generator=generator) * 1.5
        found = program.run({"x": x})
        for key, expected in net(x).items():
            torch.testing.assert_close(found[key], expected)


def test_gradients_of_modes_go_to_the_places(tmp_path: Path) -> None:
    spec = TensorSpec("x", "float32", ("a", "b"))
    net = Called(lambda x: x.mode(1).values)
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(3, 5, generator=generator).round()
    forward = capture_forward(net, {"x": x}, [spec])
    program = session_of(capture_gradient(forward), tmp_path, "onnxruntime")
    x = torch.randn(4, 8, generator=generator).round().requires_grad_()
    y = net(x)
    cotangent = torch.randn(4, generator=generator)
    (dx,) = torch.autograd.grad(y, x, cotangent)
    found = program.run({"x": x.detach(), "cotangent_output": cotangent})["grad/x"]
    torch.testing.assert_close(found, dx)
