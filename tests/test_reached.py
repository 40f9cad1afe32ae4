"""Loops of Python's that go on until a value is reached: `while error > 0.1:`, `if …: break`."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from fuseport.exporter import api
from fuseport.exporter.bundle import Bundle
from fuseport.exporter.capture import until
from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.models.user import parse_inputs
from fuseport.tests.test_decisions import the_model

SavedWith = Callable[..., tuple[Path, str]]

HEAD = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = (torch.nn.Linear(4, 4, dtype=torch.float64) for _ in range(2))

    def solved(self, h, layer):
        while not h.norm() < 0.5:
            h = h * layer(h).cos() * 0.5
        return h

    def forward(self, x):
"""

REACHED = {
    "while": """
        h = x * 2
        while h.abs().max() > 0.25:
            h = (self.a(h) / 3).tanh() * h * 0.9
        return h * 2 + x
""",
    "what was before": """
        z = torch.zeros_like(x)
        for _ in range(50):
            z_next = torch.tanh(0.4 * self.a(z) + x)
            if (z_next - z).norm() < 1e-4:
                break
            z = z_next
        return self.b(z)
""",
    "what comes then": """
        z = torch.zeros_like(x)
        for _ in range(30):
            z_next = torch.tanh(0.4 * self.a(z) + x)
            if torch.allclose(z_next, z, atol=1e-3):
                break
            z = z_next
        return self.b(z_next)
""",
    "as often as it may": """
        error, y, n = x.abs().sum(), x, 0
        while error > 0.1 and n < 9:
            y = y - 0.3 * self.a(y).sin() * y
            error = error * 0.7
            n += 1
        return y * error
""",
    "one after the other": """
        y = self.solved(x, self.a)
        return self.solved(y + x, self.b) * y
""",
    "first a number": """
        error, h = 1e9, x
        while error > 1e-3:
            new = self.a(h).tanh() * 0.3 * h
            error = (new - h).abs().max().item()
            h = new
        return h + x
""",
    "one of two values": """
        h = x
        while True:
            h = h * 0.7 + 0.01 * self.a(h).sin()
            if h.abs().max() < 0.2 or h.sum() > 40:
                break
        return h
""",
    "a result": """
        h = x
        for _ in range(12):
            h = h * 0.8 * self.a(h).cos()
            if h.abs().mean() < 0.1:
                return h * 2
        return self.b(h) - 1
""",
    "numbers of turns": """
        h, n = x, 1
        while h.abs().max() > 0.05:
            h = self.a(h).tanh() * h / (n + 1)
            n += 1
        return h * 3
""",
    "beside other decisions": """
        h = self.b(x) if x.sum() > 0 else -x
        while h.abs().max() > 0.25:
            h = self.a(h).tanh() * h * 0.9
        return h if h.sum() > 0 else h * 2
""",
    "one under two names": """
        h, last, before = x, x * 3, x.sin()
        while h.abs().max() > 0.25:
            before = h
            h = self.a(h).tanh() * h * 0.9
            last = h
        return h + last.cos() + before
""",
    "Newton's": """
        z = torch.tanh(x)
        for _ in range(20):
            inner = self.a(z) * 0.2 + x
            error = z - inner.tanh()
            if error.norm() < 1e-9:
                break
            slope = (1 - inner.tanh() ** 2)[:, :, None] * self.a.weight[None] * 0.2
            z = z - torch.linalg.solve(torch.eye(4, dtype=x.dtype) - slope, error)
        return self.b(z)
""",
    "of each row": """
        h = x
        while (large := h.norm(dim=1) > 0.5).any():
            h = torch.where(large[:, None], h * self.a(h).cos() * 0.7, h)
        return h
""",
    "without a gradient": """
        with torch.no_grad():
            z = torch.zeros_like(x)
            while (step := torch.tanh(0.4 * self.a(z) + x) - z).norm() > 1e-3:
                z = z + step
        return torch.tanh(0.4 * self.a(z) + x)
""",
    "of weights alone": """
        u = torch.ones(4, dtype=torch.float64) / 2
        for _ in range(40):
            v = self.a.weight @ u
            v = v / v.norm()
            if (v - u).norm() < 1e-2:
                break
            u = v
        return self.a(x) / (v @ self.a.weight @ u)
""",
    "beside a loop over a size": """
        h = torch.zeros_like(x[0])
        for row in x:
            h = (h + self.a(row)).tanh()
        while h.norm() > 0.1:
            h = h * self.b(h).cos() * 0.6
        return x + h
""",
}
SCALES = (0.01, 0.5, 1.0, -1.0, 3.0, 0.2, -9.0)


@pytest.fixture
def exported(saved_with: SavedWith, tmp_path: Path) -> Callable[..., tuple[Bundle, nn.Module]]:
    def export(body: str, **only: Any) -> tuple[Bundle, nn.Module]:
        torch.manual_seed(41)
        layers = {name: nn.Linear(4, 4, dtype=torch.float64) for name in "ab"}
        checkpoint, code = saved_with(HEAD + body, **layers)
        inputs = parse_inputs(["x:float64[batch,4]"])
        bundle = api.export(checkpoint, tmp_path / "bundle", model=code, inputs=inputs, **only)
        return bundle, the_model(bundle, code)

    return export


def examples() -> list[Tensor]:
    generator = torch.Generator().manual_seed(43)
    draws = (torch.randn(2 + i, 4, generator=generator, dtype=torch.float64) for i in range(7))
    return [scale * x for scale, x in zip(SCALES, draws, strict=True)]


def truth(net: nn.Module, x: Tensor, cotangent: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    wanted = {"x": x, **dict(net.named_parameters())}
    y = net(x)
    found = torch.autograd.grad(y, [*wanted.values()], cotangent, allow_unused=True)
    given = zip(wanted, wanted.values(), found, strict=True)
    grads = {f"grad/{name}": torch.zeros_like(w) if g is None else g for name, w, g in given}
    return {"output": y.detach(), **grads}


@pytest.mark.parametrize("name", REACHED)
def test_they_go_round_as_often_as_values_say(
    name: str, exported: Callable[..., tuple[Bundle, nn.Module]]
) -> None:
    bundle, net = exported(REACHED[name], format=["torchscript", "onnx"])
    assert any("one in the programs, of any number of turns" in n for n in bundle.manifest["notes"])
    script = torch.jit.load(bundle.folder / "forward.pt")
    forward, gradient = (
        onnxruntime.InferenceSession(bundle.folder / f"{kind}.onnx")
        for kind in ("forward", "gradient")
    )
    names = [value.name for value in gradient.get_outputs()]
    assert "grad/x" in names
    for x in examples():
        cotangent = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).reshape(x.shape)
        expected = truth(net, x, cotangent)
        (found,) = forward.run(None, {"x": x.numpy()})
        with torch.no_grad():
            outputs = [torch.as_tensor(found), script(x)]
        given = {"x": x.numpy(), "cotangent_output": cotangent.numpy()}
        grads = dict(zip(names, gradient.run(None, given), strict=True))
        for y in outputs:
            torch.testing.assert_close(y, expected["output"], rtol=1e-10, atol=1e-12)
        for each, ours in grads.items():
            torch.testing.assert_close(
                torch.as_tensor(ours),
                expected[each],
                rtol=1e-8,
                atol=1e-10,
                msg=f"{each} {x.shape}",
            )


def test_they_are_verified(exported: Callable[..., tuple[Bundle, nn.Module]]) -> None:
    bundle, _ = exported(REACHED["what was before"])
    code = f"{bundle.folder.parent / 'net.py'}:Net"
    report = api.verify(bundle.folder, model=code)
    assert report.exit_code() == 0, report.failures()
    gradients = {row.runtime for row in report.results if row.tensor == "grad/a.bias"}
    assert {"eager", "exported_program", "torchscript", "onnxruntime", "libtorch"} <= gradients


REFUSED = {
    "one in another": (
        """
        h = x
        while h.norm() > 0.1:
            while h.abs().max() > 0.3:
                h = h * 0.9
            h = self.a(h).tanh() * h * 0.4
        return h
""",
        "net.py:17 ends .*there is another one in it",
    ),
    "ended by itself in another": (
        """
        h = x
        for _ in range(2):
            for _ in range(9):
                h = self.a(h) * 0.5
                if h.norm() < 0.1:
                    break
        return h
""",
        "net.py:20 ends .*it ends by itself, and is in another one",
    ),
    "all turns": (
        """
        h, found = x, [x]
        while h.norm() > 0.1:
            h = self.a(h).tanh() * h * 0.4
            found.append(h)
        return torch.stack(found).sum(0)
""",
        "net.py:17 ends .*what is computed behind it hangs on how many turns",
    ),
    "a number of turns": (
        """
        h, n = x, 0
        while h.norm() > 0.1:
            h = self.a(h).tanh() * h * 0.4
            n += 1
        return h / (n + 1)
""",
        "net.py:17 ends .*what is computed behind it hangs on how many turns",
    ),
    "what is done by whether there were turns": (
        """
        h, n = x, 0
        while h.norm() > 0.1:
            h = self.a(h).tanh() * h * 0.4
            n += 1
        return x.exp() if n else h
""",
        "net.py:17 ends .*what is computed behind it hangs on how many turns",
    ),
    "what was before the one before": (
        """
        h, before, older = x, x, x
        while h.norm() > 0.1:
            older, before, h = before, h, self.a(h).tanh() * h * 0.4
        return h + older
""",
        "net.py:17 ends .*something of a turn before the last is taken behind it",
    ),
    "what it decides by their number": (
        """
        h, n = x, 0
        while h.norm() > 0.1:
            h = h * 0.7 if n < 5000 else h * 0.8
            n += 1
        return h
""",
        "net.py:17 ends .*goes on otherwise in some of its turns, as net.py:18 decides",
    ),
    "other sizes": (
        """
        h = x
        while h.norm() > 0.1:
            h = torch.cat([h, h]) * 0.3
        return h.sum(0)
""",
        "net.py:17 says, and what it holds grows from turn to turn",
    ),
    "the first turn": (
        """
        h, before = x, None
        while h.norm() > 0.1:
            h, before = (h * 0.7 if before is None else h * 0.6 + before * 0.1), h
        return h
""",
        "net.py:17 ends .*its turns take more of others than what the one before left",
    ),
    "conditions that go on by one of two": (
        """
        h = x
        while h.norm() > 0.1 or h.sum() > 1:
            h = h * 0.7
        return h
""",
        "net.py:17: .*such decisions, more than 4",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused(name: str, exported: Callable[..., tuple[Bundle, nn.Module]]) -> None:
    body, reason = REFUSED[name]
    with pytest.raises(ExportFailed) as raised:
        exported(body, programs="forward", format="onnx")
    assert re.search(reason, "\n".join([str(raised.value), *raised.value.details]))
    asked = [line for line in raised.value.details if "Tensor.__bool__" in line]
    assert all("have torch.while_loop go on" in line for line in asked)


def test_programs_are_held_against_the_model(
    exported: Callable[..., tuple[Bundle, nn.Module]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(until, "is_same", lambda *_: False)
    with pytest.raises(ExportFailed) as raised:
        exported(REACHED["while"], programs="forward", format="onnx")
    assert "its program gives something else than the model" in "\n".join(raised.value.details)
