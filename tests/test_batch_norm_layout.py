"""Gradients of a batch norm in evaluation, whatever the memory layout of what it is given."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuseport.exporter.program import TensorSpec
from fuseport.exporter.program.forward import capture_forward
from fuseport.exporter.program.gradient import capture_gradient


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
