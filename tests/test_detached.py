"""What model code writes into tensors without gradients, in programs and in their gradients."""

import torch
from torch import Tensor, nn

from fuseport.exporter.program import Program, TensorSpec
from fuseport.exporter.program.forward import capture_forward
from fuseport.exporter.program.gradient import capture_gradient

SPEC = TensorSpec("x", "float32", ("batch", 8))


class Written(nn.Module):
    """Writes without gradients: values are others then, derivatives what they were."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y, z = self.a(x).clone(), self.b(x) * 1
        with torch.no_grad():
            y.clamp_(min=0.1)
            z.mul_(3).add_(y)
            made = torch.zeros_like(z)
            made += y
        return y.sin() * z + made


class Mended(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        with torch.no_grad():
            y.nan_to_num_(nan=1.0, posinf=4.0, neginf=-4.0)
        return y.exp()


def captured(module: nn.Module) -> tuple[Program, Program]:
    forward = capture_forward(module, {"x": torch.randn(2, 8)}, [SPEC])
    return forward, capture_gradient(forward)


def test_derivatives_are_what_they_were() -> None:
    """By the gradient program, and by autograd through the forward program."""
    torch.manual_seed(0)
    module = Written()
    forward, gradient = captured(module)
    for batch in (1, 5):
        x = torch.randn(batch, 8, requires_grad=True)
        y = module(x)
        dy = torch.randn_like(y)
        expected = torch.autograd.grad(y, [x, *module.parameters()], dy)
        program = forward.exported.module()
        found = gradient.exported.module()(x.detach(), dy)
        torch.testing.assert_close(found, dict(zip(found, (y.detach(), *expected), strict=True)))
        out = program(x)
        (again,) = out.values() if isinstance(out, dict) else (out,)
        into = [x, *(program.get_parameter(name) for name, _ in module.named_parameters())]
        torch.testing.assert_close(torch.autograd.grad(again, into, dy), expected)


def test_what_is_written_over_what_is_not_finite_is_there() -> None:
    module = Mended()
    forward, gradient = captured(module)
    x = torch.tensor([[1.0, torch.nan, torch.inf, -torch.inf, 0.0, 2.0, -1.0, 3.0]])
    expected = module(x)
    assert expected.isfinite().all()
    for out in (
        forward.exported.module()(x),
        gradient.exported.module()(x, torch.ones_like(x)),
    ):
        found = out["output"] if isinstance(out, dict) else out
        torch.testing.assert_close(found, expected)
