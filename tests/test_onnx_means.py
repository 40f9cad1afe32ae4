"""Means of what is scattered to the same places, in ONNX."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fuseport.exporter.program import TensorSpec
from fuseport.exporter.program.forward import capture_forward
from fuseport.exporter.program.gradient import capture_gradient
from fuseport.tests.as_files import session_of

SPECS = (TensorSpec("x", "float32", ("nodes", 4)), TensorSpec("graphs", "int64", ("nodes",)))
REDUCTIONS = ("mean", "amax", "amin", "sum", "prod")


class Pooled(nn.Module):
    """Of five graphs."""

    def __init__(self, reduce: str, include_self: bool, dim: int) -> None:
        super().__init__()
        self.reduce, self.include_self, self.dim = reduce, include_self, dim

    def forward(self, x: Tensor, graphs: Tensor) -> Tensor:
        of = [None, None]
        of[self.dim] = slice(None)
        x = x if self.dim == 0 else x.T
        start = x.new_full((5, 4) if self.dim == 0 else (4, 5), 0.5)
        index = graphs[of[0], of[1]].expand_as(x)
        return start.scatter_reduce(self.dim, index, x, self.reduce, include_self=self.include_self)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_what_is_scattered_is_reduced_as_by_torch(
    reduce: str, include_self: bool, dim: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    module = Pooled(reduce, include_self, dim)
    examples = {"x": torch.randn(7, 4), "graphs": torch.randint(4, (7,))}
    programs = [forward := capture_forward(module, examples, SPECS)]
    if reduce == "mean":
        programs.append(capture_gradient(forward))
    x, graphs = torch.randn(11, 4, requires_grad=True), torch.randint(4, (11,))
    y = module(x, graphs)
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    given = {"x": x.detach(), "graphs": graphs, "cotangent_output": dy}
    for program in programs:
        inputs = {spec.name: given[spec.name] for spec in program.inputs}
        found = session_of(program, tmp_path, "onnxruntime").run(inputs)
        torch.testing.assert_close(found["output"], y.detach())
        if "grad/x" in found:
            torch.testing.assert_close(found["grad/x"], dx)


def test_means_of_whole_numbers_are_rounded_down(tmp_path: Path) -> None:
    class Rounded(nn.Module):
        def forward(self, x: Tensor, graphs: Tensor) -> Tensor:
            whole = (10 * x[:, 0]).long()
            return whole.new_zeros(5).scatter_reduce(0, graphs, whole, "mean", include_self=False)

    torch.manual_seed(0)
    examples = {"x": torch.randn(7, 4), "graphs": torch.randint(4, (7,))}
    program = capture_forward(Rounded(), examples, SPECS)
    given = {"x": torch.randn(30, 4), "graphs": torch.randint(4, (30,))}
    found = session_of(program, tmp_path, "onnxruntime").run(given)
    torch.testing.assert_close(found["output"], Rounded()(**given))
