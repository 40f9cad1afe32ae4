"""Gradients of a batch norm in evaluation, whatever the memory layout of what it is given."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuseport.exporter.program import TensorSpec
from fuseport.exporter.program.forward import capture_forward
from fuseport.exporter.program.gradient import capture_gradient
from fuseport.exporter.verify.modes import References


class Tokens(nn.Module):
    """Pixels as tokens: what comes back from these is channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(6)
        self.to_scores = nn.Linear(6, 5)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.running_mean)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.to_scores(F.silu(self.norm(x)).flatten(2).transpose(1, 2))
        return out


@pytest.mark.parametrize("batch", [1, 3])
def test_a_cotangent_that_is_channels_last_is_taken_for_that(batch: int) -> None:
    """Torch's kernel takes it for contiguous where the batch is 1."""
    torch.manual_seed(61)
    model = Tokens().eval()
    specs = [TensorSpec("x", "float32", ("batch", 6, "height", "width"))]
    forward = capture_forward(model, {"x": torch.randn(2, 6, 4, 5)}, specs)
    gradient = capture_gradient(forward)

    x, seed = torch.randn(batch, 6, 3, 4), torch.randn(batch, 12, 5)
    found = gradient.exported.module()(x, seed)["grad/x"]

    norm = copy.deepcopy(model.norm).double()
    assert norm.running_var is not None
    assert norm.running_mean is not None
    wide = x.double().requires_grad_()
    scale = (norm.weight / (norm.running_var + norm.eps).sqrt()).view(-1, 1, 1)
    shifted = (wide - norm.running_mean.view(-1, 1, 1)) * scale + norm.bias.view(-1, 1, 1)
    out = F.silu(shifted).flatten(2).transpose(1, 2)
    scores = out @ model.to_scores.weight.double().T
    (wanted,) = torch.autograd.grad(scores, wide, seed.double())
    torch.testing.assert_close(found, wanted.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm", [F.batch_norm, F.instance_norm])
@pytest.mark.parametrize("turned", ["x", "cotangent"])
def test_truth_has_one_layout_alone(norm: Callable[..., Tensor], turned: str) -> None:
    """Pixels as tokens and back are channels last, which torch does not see of a batch of 1."""

    def as_tokens(x: Tensor) -> Tensor:
        return x.flatten(2).mT.contiguous().mT.unflatten(2, x.shape[2:])

    torch.manual_seed(62)
    x, seed = (torch.randn(1, 6, 3, 4, dtype=torch.float64) for _ in range(2))
    mean, var, weight = (
        torch.randn(6).double(),
        torch.rand(6).double() + 0.5,
        torch.randn(6).double(),
    )
    given = {"running_mean": mean, "running_var": var, "weight": weight}
    results = []
    for layout in (as_tokens, Tensor.contiguous):
        leaf = (layout(x) if turned == "x" else x).detach().requires_grad_()
        with References():
            y = norm(leaf * 1, **given)
        results += torch.autograd.grad(y, leaf, layout(seed) if turned == "cotangent" else seed)
    torch.testing.assert_close(*results)
