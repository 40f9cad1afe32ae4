"""Complex numbers that loops over dynamic sizes carry, take, leave, and compute with."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fuseport.exporter import api
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.program import TensorSpec
from fuseport.exporter.program.complex_numbers.complex_forms import FORMS
from fuseport.exporter.program.complex_numbers.in_parts import has_complex
from fuseport.exporter.program.complex_numbers.real_regions import differentiable, real_regions
from fuseport.exporter.program.forward import capture_forward

SavedNet = Callable[[str], tuple[nn.Module, Path, str]]

HEAD = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.decay = nn.Parameter(torch.rand(4) - 1)
        self.angle = nn.Parameter(torch.rand(4) * 6)
        self.b = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64) / 4)
        self.first = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def rates(self):
        return torch.polar(self.decay.exp() / 3, self.angle)

    def forward(self, x):
        batch, length, _ = x.shape
        rates, first = self.rates(), self.first.expand(batch, 4)
"""

LOOPS = {
    "a linear recurrence": """
        h, kept, u = torch.zeros(batch, 4, dtype=self.b.dtype), [], x.to(self.b.dtype) @ self.b
        for t in range(length):
            h = rates * h + u[:, t]
            kept.append(h)
        return (torch.stack(kept, 1) @ self.b).real + x
""",
    "states before their turn": """
        h, kept = first, []
        for row in x.unbind(1):
            kept.append(h.real)
            h = (h * rates).conj() + row * self.b[0]
        return torch.stack(kept, 1), h.abs()
""",
    "numbers of other kinds beside": """
        h, count, size = first, torch.zeros(batch, dtype=torch.int64), torch.ones(batch, 4)
        for t in range(length):
            h = (h @ self.b + x[:, t]) / (1 + h.abs())
            size = size * (h.imag * 0.1 + 1)
            count = count + (h.real > 0).sum(-1)
        return torch.view_as_real(h), size, count
""",
    "real states that are turned": """
        h = x.sum(1)
        for t in range(length):
            pairs = torch.view_as_complex(h.reshape(batch, 2, 2)) * rates[:2]
            a, c = pairs.unbind(-1)
            both = torch.stack([a * c, c.conj()], -1).roll(1, -1)
            h = torch.tanh(torch.view_as_real(both).flatten(1) + x[:, t])
        return h
""",
    "loops inside": """
        h = first
        for t in range(length):
            h = h / (1 + h.abs())
            for _ in range(2):
                h = h * rates + x[:, t]
        return h.real
""",
}


@pytest.mark.parametrize("name", LOOPS)
def test_loops_have_gradients_in_every_format(
    name: str, saved_net: SavedNet, tmp_path: Path
) -> None:
    _, checkpoint, code = saved_net(HEAD + LOOPS[name])
    inputs = parse_inputs(["x:[batch,length,4]"])
    bundle = api.export(checkpoint, tmp_path / "b", model=code, inputs=inputs)
    report = api.verify(bundle.folder, model=code)
    assert report.exit_code(strict=True) == 0, report.failures()


def test_regions_have_no_complex_numbers() -> None:
    """Those of a `cond`, too, that takes and leaves some, with gradients that are the model's."""

    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            def turned(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
                return z.transpose(0, 1).conj() * y, z * 1j

            def left(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
                return z.transpose(0, 1) / 2, z + y.transpose(0, 1)

            z = torch.view_as_complex(x)[None]
            w, v = torch.cond(x.sum() > 0, turned, left, (z, z.abs().transpose(0, 1)))
            return w.abs().transpose(0, 1) + v.imag

    x = torch.randn(5, 2, generator=torch.Generator().manual_seed(54))
    program = capture_forward(Net(), {"x": x}, [TensorSpec("x", "float32", ("length", 2))])
    for changed in (differentiable(program.exported), real_regions(program.exported, FORMS)):
        (call,) = (node for node in changed.graph.nodes if str(node.target) == "cond")
        bodies = [getattr(changed.graph_module, str(node.target)) for node in call.args[1:3]]
        nodes = [node for body in bodies for node in body.graph.nodes]
        assert len(nodes) > 10
        assert not any(map(has_complex, [call, *nodes]))
        for given in (x, -x[:3]):
            leaf, wanted = (given.clone().requires_grad_() for _ in range(2))
            found = changed.module()(leaf)
            expected = Net()(wanted)
            torch.testing.assert_close(found, expected)
            found.prod().backward()
            expected.prod().backward()
            torch.testing.assert_close(leaf.grad, wanted.grad)
