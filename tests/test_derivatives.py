"""Models that differentiate in their forward: forces, Jacobians, Hessians, gradients of samples."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fuseport.exporter import api
from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.models._deriving import deriving
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.program import TensorSpec, count_nodes
from fuseport.exporter.program.forward import capture_forward
from fuseport.exporter.program.gradient import capture_gradient
from fuseport.ops import selective_scan
from fuseport.tests.as_files import session_of

F = nn.functional
Function = Callable[[nn.Module, Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.mlp = nn.Sequential(nn.Linear(3, 5), nn.SiLU(), nn.LayerNorm(5), nn.Linear(5, 2))
        self.plain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def _grad(y: Tensor, x: Tensor, **by: bool) -> Tensor:
    return torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True, **by)[0]


def _forces(net: nn.Module, x: Tensor) -> Tensor:
    x.requires_grad_(True)
    off = x[:, :, None] - x[:, None]
    near = torch.exp(-(off.square().sum(-1) + 0.1).sqrt())
    return -_grad(net.mlp(x).sum((1, 2)) + near.sum((1, 2)), x)


def _of_a_part(net: nn.Module, x: Tensor) -> Tensor:
    with torch.enable_grad():
        h = (x * 1.5).requires_grad_(True)
        with torch.no_grad():
            weight = net.mlp(h).tanh()
        out = torch.zeros(x.shape[0], 2)
        out.scatter_add_(1, torch.zeros(x.shape[:2], dtype=torch.long), h.exp().sum(-1))
        out[:, 1] = h.square().sum((1, 2))
        y = (net.mlp(h) * weight * h.norm(dim=-1, keepdim=True).detach()).sum(1) + out.square()
        return _grad(y, h) + x


def _laplacian(net: nn.Module, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    first = _grad(net.mlp(x).square().sum(), x)
    return sum(_grad(first[..., i], x)[..., i] for i in range(3)) * 0.1


def _by_what_comes_between(net: nn.Module, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    h = x.sin()
    first = _grad(net.mlp(h).square().sum(), x)
    return _grad(first.sum(), h)


def _without_a_graph(net: nn.Module, x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_(True)
        (found,) = torch.autograd.grad(net.mlp(x).exp().sum(), x)
    return found * net.mlp(x).sum(-1, keepdim=True)


def _of_two(net: nn.Module, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    weight = net.mlp[0].weight
    dx, dw, none = torch.autograd.grad(
        net.mlp(x).square().sum(), (x, weight, net.mlp[3].bias.new_ones(1).requires_grad_()),
        create_graph=True, allow_unused=True,
    )  # fmt: skip
    assert none is None
    return dx @ dw.mT


def _energy(net: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: net.plain(x).square().sum()


def _summed(net: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: net.plain(x).sin().sum(-2)


def _pulled(net: nn.Module, x: Tensor) -> Tensor:
    y, pull = torch.func.vjp(_summed(net), x)
    return pull(y.cos())[0]


FUNCTIONS: dict[str, Function] = {
    "forces": _forces,
    "of a part, with writes and without gradients": _of_a_part,
    "a Laplacian": _laplacian,
    "by what comes between": _by_what_comes_between,
    "without a graph": _without_a_graph,
    "by two": _of_two,
    "grad": lambda net, x: torch.func.grad(_energy(net))(x),
    "grad_and_value": lambda net, x: sum(torch.func.grad_and_value(_energy(net))(x)),
    "vjp": _pulled,
    "jvp": lambda net, x: torch.func.jvp(_summed(net), (x,), (x.cos(),))[1],
    "jacrev": lambda net, x: torch.func.jacrev(_summed(net))(x[0]),
    "jacfwd": lambda net, x: torch.func.jacfwd(_summed(net))(x[0]),
    "hessian": lambda net, x: torch.func.hessian(_energy(net))(x[0]),
    "per sample": lambda net, x: torch.vmap(torch.func.grad(_energy(net)))(x),
    "pushed per sample": lambda net, x: torch.vmap(
        lambda one: torch.func.jvp(_summed(net), (one,), (one.cos(),))[1]
    )(x),
    "a Jacobian, vectorized": lambda net, x: torch.autograd.functional.jacobian(
        _summed(net), x[0], create_graph=True, vectorize=True
    ),
    "hvp": lambda net, x: torch.autograd.functional.hvp(
        _energy(net), x, x.cos(), create_graph=True
    )[1],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_they_are_the_models_at_other_sizes_with_gradients(name: str, tmp_path: Path) -> None:
    torch.manual_seed(11)
    net = Net(FUNCTIONS[name]).eval()
    specs = [TensorSpec("x", "float32", ("batch", "atoms", 3))]
    forward = capture_forward(net, {"x": torch.randn(2, 5, 3)}, specs)
    for program in (forward, capture_gradient(forward)):
        for runtime in ("torchscript", "onnxruntime"):
            session = session_of(program, tmp_path, runtime)
            for batch, atoms in ((3, 4), (1, 6)):
                generator = torch.Generator().manual_seed(atoms)
                x = torch.randn(batch, atoms, 3, generator=generator, requires_grad=True)
                y = net(x * 1)
                seed = torch.randn(y.shape, generator=generator)
                given = {"x": x.detach(), "cotangent_output": seed}
                found = session.run({spec.name: given[spec.name] for spec in program.inputs})
                torch.testing.assert_close(found["output"], y.detach(), rtol=1e-4, atol=1e-4)
                if program is forward:
                    continue
                wanted = {"x": x, **dict(net.named_parameters())}
                truth = torch.autograd.grad(y, list(wanted.values()), seed, allow_unused=True)
                for (key, _), gradient in zip(wanted.items(), truth, strict=True):
                    if gradient is None or not gradient.count_nonzero():
                        assert (
                            f"grad/{key}" not in found or not found[f"grad/{key}"].count_nonzero()
                        )
                    else:
                        close = {"rtol": 1e-4, "atol": 1e-4 * float(gradient.abs().max())}
                        torch.testing.assert_close(found[f"grad/{key}"], gradient, **close)


def test_a_derivative_of_an_op_is_its_backward() -> None:
    class Scan(nn.Module):
        def forward(self, u: Tensor) -> Tensor:
            with torch.enable_grad():
                u = u.detach().requires_grad_()
                a, b = -torch.ones(3, 2), torch.ones(u.shape[0], 2, u.shape[2])
                y = selective_scan(u, F.softplus(u), a, b, b)
                (found,) = torch.autograd.grad(y.square().sum(), u)
            return found

    net, u = Scan(), torch.randn(2, 3, 7)
    specs = [TensorSpec("u", "float32", ("batch", 3, "length"))]
    program = capture_forward(net, {"u": u}, specs)
    assert count_nodes(program, "fuseport::selective_scan_backward") == 1
    assert count_nodes(program, "fuseport::selective_scan") == 1
    u = torch.randn(1, 3, 9)
    torch.testing.assert_close(program.exported.module(check_guards=False)(u), net(u))


def test_what_is_computed_already_is_not_computed_anew() -> None:
    net = Net(_forces).eval()
    specs = [TensorSpec("x", "float32", ("batch", "atoms", 3))]
    forward = capture_forward(net, {"x": torch.randn(2, 5, 3)}, specs)
    for operator in ("aten::exp", "aten::native_layer_norm", "aten::addmm"):
        found = count_nodes(forward, operator)
        assert found <= (2 if operator == "aten::addmm" else 1), operator
    laplacian = capture_forward(Net(_laplacian).eval(), {"x": torch.randn(2, 5, 3)}, specs)
    for operator in ("aten::native_layer_norm", "aten::sigmoid"):  # which six derivatives need
        assert count_nodes(laplacian, operator) == 1, operator


REFUSED: dict[str, tuple[Function, str]] = {
    "by what has no part in it": (
        lambda net, x: _grad(net.mlp(x), torch.ones(2, requires_grad=True) * x.sum()),
        "appears to not have been used",
    ),
    "through random numbers": (
        lambda net, x: _grad(F.dropout(net.mlp(x.requires_grad_()), 0.5), x),
        "random numbers",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused(name: str) -> None:
    function, said = REFUSED[name]
    specs = [TensorSpec("x", "float32", ("batch", "atoms", 3))]
    with pytest.raises(ExportFailed, match=said):
        capture_forward(Net(function).eval(), {"x": torch.randn(2, 5, 3)}, specs)


FORCES = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(3, 8), torch.nn.SiLU(), torch.nn.Linear(8, 1)
        )

    def forward(self, positions):
        positions.requires_grad_(True)
        energy = self.mlp(positions).sum((1, 2))
        (gradient,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
        return {"energy": energy, "forces": -gradient}
"""


def test_a_model_that_needs_autograd_in_its_forward_is_verified(
    saved_net: Callable[[str], tuple[nn.Module, Path, str]], tmp_path: Path
) -> None:
    _, checkpoint, model = saved_net(FORCES)
    inputs = parse_inputs(["positions:[batch,atoms,3]"])
    formats = ["torchscript", "onnx"]
    bundle = api.export(checkpoint, tmp_path / "bundle", model=model, inputs=inputs, format=formats)
    report = api.verify(bundle.folder, model=model, runtime=("eager", "torchscript", "onnxruntime"))
    assert report.exit_code() == 0, report.failures()
    compared = {(row.runtime, row.tensor) for row in report.results if row.verdict == "pass"}
    assert {("onnxruntime", "forces"), ("onnxruntime", "grad/positions")} <= compared


def test_energies_whose_graph_forces_free_are_verified_with_gradients(
    saved_net: Callable[[str], tuple[nn.Module, Path, str]], tmp_path: Path
) -> None:
    text = FORCES.replace("create_graph=True", "create_graph=self.training")
    _, checkpoint, model = saved_net(text)
    inputs = parse_inputs(["positions:[batch,atoms,3]"])
    bundle = api.export(
        checkpoint, tmp_path / "bundle", model=model, inputs=inputs, format=["torchscript"]
    )
    report = api.verify(bundle.folder, model=model, runtime=("torchscript",))
    assert report.exit_code() == 0, report.failures()
    compared = {(row.program, row.tensor) for row in report.results if row.verdict == "pass"}
    assert {("forward", "forces"), ("gradient", "grad/positions")} <= compared


def test_a_model_that_differentiates_nothing_is_called_plainly_from_then_on() -> None:
    modes: list[int] = []

    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            modes.append(torch._C._len_torch_function_stack())
            return x * 2

    class Deriving(Plain):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x.requires_grad_()).square().sum()
            return torch.autograd.grad(y, x)[0]

    for module, expected in ((Plain(), [1, 0, 1]), (Deriving(), [1, 1, 1])):
        modes.clear()
        call = deriving(module, module)
        for length in (2, 2, 3):
            call(torch.randn(length))
        assert modes == expected
