"""Tensors of a lower rank than ONNX takes: of one element, of one sample; and torch's own forms."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuseport.exporter.capture import capture
from fuseport.exporter.models.model import Model
from fuseport.exporter.program import TensorSpec
from fuseport.exporter.program.forward import capture_forward
from fuseport.exporter.program.gradient import capture_gradient
from fuseport.tests.as_files import session_of


def zero(x: Tensor) -> Tensor:
    return torch.zeros_like(x, dtype=torch.long)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda x: x * (x > 0).all(0),
    "amax": lambda x: x.amax(0),
    "aminmax": lambda x: torch.aminmax(x, dim=0)[1],
    "any": lambda x: x * (x > -9).any(0),
    "gather": lambda x: x.gather(0, zero(x)),
    "kthvalue": lambda x: x.kthvalue(1, 0)[0],
    "max": lambda x: x.max(0)[0],
    "normalize": lambda x: F.normalize(x, dim=0),
    "prod": lambda x: x.prod(0),
    "scatter": lambda x: x.scatter(0, zero(x), x * 2),
    "scatter a number": lambda x: x + x.scatter(0, zero(x), 2.0),
    "scatter_add": lambda x: x.scatter_add(0, zero(x), x),
    "scatter_reduce": lambda x: torch.scatter_reduce(x, 0, zero(x), x * 2, "amax"),
    "sort": lambda x: x.sort(0)[0],
    "take": lambda x: x.take(torch.tensor([0, 0])),
    "topk": lambda x: x.topk(1, 0)[0],
    "var": lambda x: x + x.var(0, unbiased=False),
    "var_mean": lambda x: torch.var_mean(x, 0, unbiased=False)[1],
}


class OfMean(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x.mean()) * 2


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_tensor_of_rank_0_is_as_one_element(name: str, tmp_path: Path) -> None:
    net = OfMean(FUNCTIONS[name])
    forward = capture_forward(net, {"x": torch.randn(2, 3)}, [TensorSpec("x", "float32", ("n", 3))])
    x = torch.tensor([[1.0, -2.0, 0.5]] * 4, requires_grad=True)
    y = net(x)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    given = {"x": x.detach(), "cotangent_output": torch.ones_like(y)}
    for program in (forward, capture_gradient(forward)):
        session = session_of(program, tmp_path, "onnxruntime")
        found = session.run({s.name: given[s.name] for s in program.inputs})
        torch.testing.assert_close(found["output"], y.detach())
    torch.testing.assert_close(found["grad/x"], dx)


@pytest.mark.parametrize("accumulate", [False, True])
def test_what_is_put_at_places_of_a_matrix(accumulate: bool, tmp_path: Path) -> None:
    class Put(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            places = torch.tensor([[1, -2], [4, 1 if accumulate else 0]])
            return x.put(places, x[:2, :2] * 3, accumulate)

    program = capture_forward(
        Put(), {"x": torch.randn(4, 3)}, [TensorSpec("x", "float32", ("n", 3))]
    )
    session = session_of(program, tmp_path, "onnxruntime")
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(session.run({"x": x})["output"], Put()(x))


def _beside_a_loop(x: Tensor) -> Tensor:
    """Torch traces the whole of a program with regions for its own forms of operators."""
    rows, h = [], torch.zeros(3)
    for t in range(x.shape[0]):
        h = torch.tanh(h + x[t])
        rows.append(h)
    return torch.stack(rows)


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "one sample's windows": lambda x: F.unfold(x.mT.unsqueeze(-1), (2, 1), padding=(1, 0)),
    "one sample of windows": lambda x: F.fold(x.mT.repeat(2, 1), (x.shape[0] + 1, 1), (2, 1)),
    "a product": lambda x: _beside_a_loop(x) * x.prod(),
    "strides": lambda x: _beside_a_loop(x.mT.index_copy(0, torch.tensor([0]), x.mT[1:2] * 2).mT),
}


@pytest.mark.parametrize("name", OTHERS)
def test_torch_s_own_forms_and_samples(name: str, tmp_path: Path) -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return OTHERS[name](x)

    net, spec = Net(), TensorSpec("x", "float32", ("n", 3))
    model = Model(net, "user", {}, (spec,), {"n": 4})
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(6, 3, generator=draw, requires_grad=True)
    y = net(x)
    cotangent = torch.randn(y.shape, generator=draw)
    (dx,) = torch.autograd.grad(y, x, cotangent)
    given = {"x": x.detach(), "cotangent_output": cotangent}
    for program in capture(model, ("forward", "gradient"), 0, lambda _: None):
        session = session_of(program, tmp_path, "onnxruntime")
        found = session.run({s.name: given[s.name] for s in program.inputs})
        torch.testing.assert_close(found["output"], y.detach())
    torch.testing.assert_close(found["grad/x"], dx)
