"""Functions that take sizes where torch knows numbers, at other sizes, in files."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fuseport.exporter.program import TensorSpec
from fuseport.exporter.program.forward import capture_forward
from fuseport.exporter.program.gradient import capture_gradient
from fuseport.tests.as_files import session_of


def _with_ones(x: Tensor) -> Tensor:
    x = x.clone()
    x.diagonal().fill_(1)
    return x


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "a diagonal": lambda x: x @ x.mT + torch.zeros(x.shape[1], x.shape[1]).fill_diagonal_(0.7),
    "a diagonal of what hangs on it": lambda x: (x[..., 0] * 3).fill_diagonal_(2) + x.sum(),
    "written to a diagonal": lambda x: (
        torch.diagonal_scatter(x, torch.diagonal(x, -1, 1, 2) * 2, -1, 1, 2)
        + torch.diagonal_scatter(x, x.diagonal(1, 0, 2).sin(), 1, 0, 2)
    ),
    "drawn for sure": lambda x: torch.bernoulli((x > 0).float()) * x,
    "norms of groups, turned": lambda x: nn.functional.group_norm(x.mT, 3).mT.norm() * x,
    "a diagonal that is written to": lambda x: _with_ones(x[0] @ x[0].mT) * x.sum(),
    "blocks": lambda x: torch.block_diag(x[0].mT, x[:, 0], x[0, :, 0], x.sum()),
    "blocks of rows": lambda x: torch.block_diag(x[0], x[0] * 3),
    "repeated by a size": lambda x: x.repeat_interleave(x.shape[0], 0),
    "repeated by more than one": lambda x: torch.repeat_interleave(x, x.shape[1] + 1, 1),
    "all repeated": lambda x: x.repeat_interleave(x.shape[0]),
    "written to fewer places": lambda x: (
        torch.zeros_like(x).scatter(1, torch.ones_like(x[:, :1], dtype=torch.long), x.detach())
        + x.scatter_add(1, torch.zeros_like(x[:, 1:], dtype=torch.long), x.detach())
    ),
    "rolled by half": lambda x: x.roll(x.shape[1] // 2, 1),
    "rolled along two": lambda x: x.roll((x.shape[1] + 1, 1), (0, 1)),
    "rolled back": lambda x: x.roll(-x.shape[0], -2),
    "all rolled": lambda x: x.roll(x.shape[0]),
    "split into parts": lambda x: torch.cat(torch.tensor_split(x, 3, 1)[::-1], 1),
    "split behind places": lambda x: torch.cat(x.tensor_split((1, 3), 1)[::-1], 1),
}


class Net(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x) * 2


@pytest.mark.parametrize("name", FUNCTIONS)
def test_they_are_the_models_at_other_sizes(name: str, tmp_path: Path) -> None:
    net = Net(FUNCTIONS[name])
    specs = [TensorSpec("x", "float32", ("batch", "length", 3))]
    forward = capture_forward(net, {"x": torch.randn(2, 5, 3)}, specs)
    for program in (forward, capture_gradient(forward)):
        for runtime in ("torchscript", "onnxruntime"):
            session = session_of(program, tmp_path, runtime)
            for batch, length in ((4, 7), (1, 3), (3, 8)):
                generator = torch.Generator().manual_seed(length)
                x = torch.randn(batch, length, 3, generator=generator, requires_grad=True)
                y = net(x)
                seed = torch.randn(y.shape, generator=generator)
                given = {"x": x.detach(), "cotangent_output": seed}
                found = session.run({spec.name: given[spec.name] for spec in program.inputs})
                torch.testing.assert_close(found["output"], y.detach())
                if program is not forward:
                    (dx,) = torch.autograd.grad(y, x, seed)
                    torch.testing.assert_close(found["grad/x"], dx)


class Strided(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = (x * 2).contiguous()
        return torch.as_strided(x, (x.shape[0], 4), (x.shape[1], 1)).sin()


def test_views_by_strides_are_of_what_the_code_made_contiguous() -> None:
    specs = [TensorSpec("x", "float32", ("batch", 5))]
    program = capture_forward(Strided(), {"x": torch.randn(3, 5)}, specs)
    x = torch.randn(5, 7).mT
    found = program.exported.module(check_guards=False)(x)
    torch.testing.assert_close(found, Strided()(x))
