"""Gradients of TorchScript artifacts, from their second call on: autograd's, not TorchScript's."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuseport.exporter.formats import DEFAULT_OPSET, Options, _autodiff, torchscript
from fuseport.exporter.inspect import torchscript as inspected
from fuseport.exporter.program import TensorSpec
from fuseport.exporter.program.forward import capture_forward
from fuseport.exporter.runtimes import libtorch
from fuseport.exporter.runtimes import torchscript as torchscript_runtime

SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.5, -2.0, 3.0, -3.0, 6.0, -10.0, 300.0, 25.0, -1e-4)
COMPLEX = (0.5 + 0.3j, -1 + 2j, 0.2 - 0.7j, 2 + 0j)

Binary = Callable[[Tensor, Tensor], Tensor]

# Where TorchScript's own formulas give something else.
OTHERS: dict[str, Binary] = {
    "clamp": lambda a, b: torch.clamp(a, -1, 1),
    "clamp to the right": lambda a, b: torch.clamp(a, max=1),
    "clamp to tensors": lambda a, b: torch.clamp(a, b, b + 1),
    "divide": lambda a, b: a / (b + 0.5),
    "hardsigmoid": lambda a, b: F.hardsigmoid(a),
    "hardswish": lambda a, b: F.hardswish(a),
    "hardtanh": lambda a, b: F.hardtanh(a),
    "clip": lambda a, b: a.clip(-1, 1),
    "leaky_relu": lambda a, b: F.leaky_relu(a, 0.1),
    "max": lambda a, b: torch.max(a, b.relu()),
    "min": lambda a, b: torch.min(a, b.relu()),
    "relu": lambda a, b: F.relu(a),
    "relu6": lambda a, b: F.relu6(a),
    "softplus": lambda a, b: F.softplus(a),
    "std": lambda a, b: (a * 0).std(0),
    "threshold": lambda a, b: F.threshold(a, 1.0, 0.0),
    "true_divide": lambda a, b: torch.true_divide(a, b + 0.5),
    "where": lambda a, b: torch.where(a > b, a, b),
}

# Where they say what autograd says, to rounding.
SAME: dict[str, Binary] = {
    "abs": lambda a, b: a.abs(),
    "add": lambda a, b: a + b,
    "cos": lambda a, b: a.cos(),
    "exp": lambda a, b: (a / 10).exp(),
    "gelu": lambda a, b: F.gelu(a),
    "log": lambda a, b: a.log(),
    "log1p": lambda a, b: a.log1p(),
    "logsumexp": lambda a, b: a.logsumexp(0),
    "matmul": lambda a, b: a[None] @ b[:, None],
    "maximum": lambda a, b: torch.maximum(a, b.abs()),
    "mean": lambda a, b: a.mean(0),
    "mul": lambda a, b: a * b,
    "reciprocal": lambda a, b: a.reciprocal(),
    "remainder": lambda a, b: a.remainder(1.0),
    "rsqrt": lambda a, b: a.rsqrt(),
    "sigmoid": lambda a, b: a.sigmoid(),
    "silu": lambda a, b: F.silu(a),
    "sqrt": lambda a, b: a.sqrt(),
    "var": lambda a, b: a.var(0),
}


class Net(nn.Module):
    """An operator among others that TorchScript differentiates, too."""

    def __init__(self, operator: Binary, dtype: torch.dtype) -> None:
        super().__init__()
        self.operator = operator
        self.w = nn.Parameter(torch.ones(1, dtype=dtype))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        value = self.operator(x * self.w, y * self.w)
        return value * self.w * self.w * self.w * self.w


def gradients(
    call: Callable[[Tensor, Tensor], Tensor], values: Tensor, seed: float, times: int
) -> list[Tensor | None]:
    """Of both inputs, at the last of some calls."""
    found: list[Tensor | None] = []
    for _ in range(times):
        x, y = values.clone().requires_grad_(), values.flip(0).clone().requires_grad_()
        result = call(x, y)
        found = list(
            torch.autograd.grad(result, [x, y], torch.full_like(result, seed), allow_unused=True)
        )
    return found


def written(net: nn.Module, values: Tensor, file: Path) -> Path:
    dtype = str(values.dtype).removeprefix("torch.")
    specs = [TensorSpec(name, dtype, ("length",)) for name in "xy"]
    program = capture_forward(net, {name: values.clone() for name in "xy"}, specs)
    torchscript.write(program, file, Options(file, DEFAULT_OPSET))
    return file


def differences(net: nn.Module, values: Tensor, folder: Path) -> Iterator[str]:
    """Where the third call of the artifact has another gradient than the model."""
    file = written(net, values, folder / "net.pt")
    near = 64 * torch.finfo(values.dtype).eps
    for seed in (1.0, -0.7, 0.0, math.inf):
        loaded = torch.jit.load(file)  # anew: what its first call asks for counts
        found = gradients(loaded, values, seed, 3)
        expected = gradients(net, values, seed, 1)
        for name, a, b in zip("xy", found, expected, strict=True):
            given = [torch.zeros_like(values) if t is None else t for t in (a, b)]
            close = torch.isclose(*given, rtol=near, atol=0, equal_nan=True)
            yield from (f"{name}[{i}], cotangent {seed}" for i in (~close).nonzero().flatten())


@pytest.mark.parametrize("name", OTHERS)
def test_gradients_stay_autograds(name: str, tmp_path: Path) -> None:
    net = Net(OTHERS[name], torch.float32)
    assert not list(differences(net, torch.tensor(SPECIAL), tmp_path))


@pytest.mark.parametrize("name", OTHERS)
def test_torchscripts_own_gradients_are_others(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_autodiff, "differs", lambda node: False)
    dtype = torch.float16 if "divide" in name else torch.float64
    values = torch.tensor(SPECIAL, dtype=dtype)
    assert list(differences(Net(OTHERS[name], dtype), values, tmp_path))


@pytest.mark.parametrize("name", SAME)
def test_other_operators_need_no_block(name: str, tmp_path: Path) -> None:
    net = Net(SAME[name], torch.float32)
    assert not list(differences(net, torch.tensor(SPECIAL), tmp_path))


@pytest.mark.parametrize("known", [True, False])
def test_gradients_have_the_dtypes_of_what_they_are_of(
    known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a product of matrices before has one of bfloat16 and one of float32, and raises."""

    def mixed(a: Tensor, b: Tensor) -> Tensor:
        half = (a[None] @ b[:, None]) * a
        return (half * b.float()).bfloat16()

    if not known:
        monkeypatch.setattr(_autodiff, "differs", lambda node: False)
    net, values = Net(mixed, torch.bfloat16), torch.tensor(SPECIAL[2:8], dtype=torch.bfloat16)
    if known:
        assert not list(differences(net, values, tmp_path))
    else:
        with pytest.raises(RuntimeError, match="same dtype"):
            list(differences(net, values, tmp_path))


# Of complex numbers every formula lacks a conjugate.
OF_COMPLEX: dict[str, Binary] = {
    "cos": lambda a, b: a.cos(),
    "divide": lambda a, b: a / b,
    "exp": lambda a, b: a.exp(),
    "matmul": lambda a, b: a[None] @ b[:, None],
    "mul": lambda a, b: a * b,
    "sigmoid": lambda a, b: a.sigmoid(),
}


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("name", OF_COMPLEX)
def test_gradients_of_complex_numbers_are_conjugated(
    name: str, known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_parts(a: Tensor, b: Tensor) -> Tensor:
        value = OF_COMPLEX[name](torch.complex(a, b), torch.complex(b, a))
        return (value * torch.complex(b, b)).real

    if not known:
        monkeypatch.setattr(_autodiff, "differs", lambda node: False)
    values = torch.tensor([0.5, -1.0, 0.2, 2.0, 0.3])
    found = list(differences(Net(of_parts, torch.float32), values, tmp_path))
    assert bool(found) != known


class Roots(nn.Module):
    """As TorchScript has it whom nobody asked for autograd's gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(x * self.w)
        return y.sqrt() * self.w * self.w * self.w


@pytest.mark.parametrize("runtime", [torchscript_runtime, libtorch])
def test_verify_sees_gradients_of_a_later_call(runtime: ModuleType, tmp_path: Path) -> None:
    """Calls that ask for no gradient come first, and do not hide what training would meet."""
    torch.jit.script(Roots()).save(tmp_path / "net.pt")
    session = runtime.load(tmp_path / "net.pt", {"outputs": [{"name": "output"}]})
    given = {"x": torch.tensor([-1.0, 4.0])}
    for _ in range(3):
        session.run(given)
    cotangents = {"output": torch.ones(2)}
    first, *_, last = [session.differentiate(given, cotangents) for _ in range(3)]
    assert first["grad/x"].tolist() == [0, 0.25]
    assert last["grad/x"].isnan().tolist() == [True, False]
    assert set(last) == {"output", "grad/x", "grad/w"}
    assert torch.equal(session.run(given)["output"], torch.tensor([0.0, 2.0]))


def test_what_stands_in_both_branches_is_counted_once(tmp_path: Path) -> None:
    net = Net(lambda a, b: torch.where(a > b, a.relu(), b), torch.float32)
    file = written(net, torch.tensor(SPECIAL), tmp_path / "net.pt")
    assert torch.jit.load(file).code.count("torch.where") == 2
    counts = inspected.found(str(file))["ops"]["counts"]["aten"]
    assert counts == {"gt": 1, "mul": 6, "relu": 1, "where": 1}
