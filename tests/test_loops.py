"""Loops of model code over dynamic sizes: `for t in range(length)`, and their kin."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from fuseport.exporter import api
from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.models.user import parse_inputs

SavedNet = Callable[[str], tuple[nn.Module, Path, str]]

HEAD = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.cell = nn.LSTMCell(3, 3)

    def step(self, h, x):
        return torch.tanh(self.a(h) + x)

    def forward(self, x):
        batch, length, _ = x.shape
        h, ys, out = torch.zeros(batch, 3), [], torch.zeros_like(x)
"""

# What is behind the head, and the smallest length that programs of it take: a first turn that does
# something else is not in the loop, which has to have a turn then.
FORMS: dict[str, tuple[str, int]] = {
    "states, stacked": (
        """
        for t in range(length):
            h = self.step(h, x[:, t])
            ys.append(h)
        return torch.stack(ys, dim=1) + x, h
""",
        1,
    ),
    "before each turn": (
        """
        for t in range(length):
            ys.append(h)
            h = self.step(h, x[:, t])
        return torch.stack(ys, 1) * x
""",
        1,
    ),
    "in another type": (
        """
        for t in range(length):
            h = torch.tanh(h.double() + self.a(x[:, t]).to(x.dtype)).float()
            ys.append(h)
        return torch.stack(ys, dim=1)
""",
        1,
    ),
    "written where values say": (
        """
        last = torch.zeros(3, 3)
        for i in x[-1].argmax(1):
            h = self.step(h, last[i.item()])
            last[i] = h[0] + last[:, i.item()] + 1
        return h, last
""",
        1,
    ),
    "turned, and multiplied": (
        """
        for t in range(length):
            h = self.step(h[:, [2, 0, 1]], x[:, t])
        return h
""",
        1,
    ),
    "with constants of its own": (
        """
        for t in range(length):
            h = self.step(h[:, [2, 0, 1]] * torch.tensor([1.0, -2.0, 0.5]), x[:, t])
            ys.append(h * torch.tensor([1.0, -2.0, 0.5]) + torch.tensor(3.0))
        return torch.stack(ys, 1)
""",
        1,
    ),
    "last alone": (
        """
        x = self.a(x)
        for t in range(length):
            h = 0.5 * h + x[:, t]
        return h
""",
        1,
    ),
    "none at first": (
        """
        h, total = None, 0
        for t in reversed(range(length)):
            h = x[:, t] if h is None else self.step(h, x[:, t])
            total = total + h.sum(-1)
            ys.insert(0, h)
        return torch.stack(ys, 1) - x, total
""",
        2,
    ),
    "written from behind": (
        """
        for t in range(length - 1, -1, -1):
            h = self.step(h, x[:, t])
            out[:, t, :] = h
        both = x.new_zeros(length, batch, 2, 3)
        for t in range(length - 1, -1, -1):
            h = self.step(h, x[:, t])
            both[t, :, 1, :] = h
        return out, both.flatten(2)
""",
        1,
    ),
    "with one before": (
        """
        h = x[:, 0]
        ys = [h]
        for t in range(1, x.size(1)):
            h = self.step(h, x[:, t] - x[:, t - 1]) * t
            ys.append(h)
        return torch.cat([y.unsqueeze(1) for y in ys], 1)
""",
        2,
    ),
    "written": (
        """
        for t, row in enumerate(x.unbind(1)):
            out[:, t] = self.a(row) / (t + 1)
        return out
""",
        1,
    ),
    "written and read": (
        """
        out = out + x
        for t in range(1, length):
            out[:, t] = self.step(out[:, t - 1], out[:, t])
        return out
""",
        2,
    ),
    "of a batch": (
        """
        return torch.stack([F.softmax(self.a(x[i]), 0) for i in range(len(x))])
""",
        1,
    ),
    "gone over": (
        """
        c = h
        for row, other in zip(x.transpose(0, 1), x.unbind(1)):
            h, c = self.cell(row * other, (h, c))
            ys += [h, c]
        return torch.cat(ys, 1)
""",
        1,
    ),
    "in pairs": (
        """
        for t in range(0, length - 1, 2):
            h = self.step(h, x[:, t : t + 1].squeeze(1) - x[:, t + 1])
        return h
""",
        2,
    ),
    "added up": (
        """
        ys = [self.a(x[:, t]) for t in range(length)]
        return sum(ys), sum(row.tanh() * i for i, row in enumerate(x.unbind(1))), sum(ys, x[:, 0])
""",
        1,
    ),
    "weighed by its number": (
        """
        for t in range(length):
            h = torch.add(self.step(h, x[:, t]), t, alpha=0.25)
        return h
""",
        1,
    ),
    "gates by hand": (
        """
        c = h
        for t in range(length):
            gates = F.linear(torch.cat([x[:, t], h], -1), torch.ones(12, 6) * 0.1).chunk(4, -1)
            c = gates[1].sigmoid() * c + gates[0].sigmoid() * gates[2].tanh()
            h = gates[3].sigmoid() * c.tanh()
        return h
""",
        1,
    ),
    "one within another": (
        """
        for i in range(batch):
            g, row = torch.zeros(3), []
            for t in range(length):
                g = self.step(g, x[i, t])
                row.append(g)
            ys.append(torch.stack(row))
        return torch.stack(ys)
""",
        1,
    ),
}


def exported(saved_net: SavedNet, body: str, folder: Path, **options: object) -> tuple:
    """The model, its bundle, and what --model is."""
    module, checkpoint, code = saved_net(HEAD + body)
    inputs = parse_inputs(["x:[batch,length,3]"])
    return module, api.export(checkpoint, folder, model=code, inputs=inputs, **options), code


def test_turns_may_take_a_matrix_and_what_is_turned_of_it(
    saved_net: SavedNet, tmp_path: Path
) -> None:
    """And parts of one, of which torch's `scan` says that they alias each other."""
    body = """
        rows, others = (self.a.weight * 2).chunk(2, 1)
        for t in range(length):
            h = torch.tanh(self.a.weight @ h.mT + x[:, t].mT).mT @ self.a.weight.mT
            h = h + (x[:, t] @ rows.mT[:1].mT) @ others.mT[:1] + x[:, t] * x[0, 0]
            ys.append(h)
        return torch.stack(ys, dim=1)
"""
    _, bundle, code = exported(saved_net, body, tmp_path / "b")
    report = api.verify(bundle.folder, model=code)
    assert report.exit_code(strict=True) == 0, report.failures()


def test_a_layer_takes_each_row_alone(saved_net: SavedNet, tmp_path: Path) -> None:
    """Which its gradient needs again: what a turn returns, and a Gemm of a turned matrix takes."""
    body = "        return torch.stack([self.a(row) for row in self.a(x[:, 0])])\n"
    _, bundle, code = exported(saved_net, body, tmp_path / "b", format="onnx")
    report = api.verify(bundle.folder, model=code, runtime="onnxruntime")
    assert report.exit_code(strict=True) == 0, report.failures()


@pytest.mark.parametrize("name", FORMS)
def test_a_loop_has_as_many_turns_as_its_input_says(
    name: str, saved_net: SavedNet, tmp_path: Path
) -> None:
    body, least = FORMS[name]
    module, bundle, _ = exported(
        saved_net, body, tmp_path / "b", programs="forward", format="torchscript"
    )
    program = torch.jit.load(bundle.folder / "forward.pt")
    with torch.no_grad():
        for batch, length in (1, least), (3, least + 1), (2, 41):
            x = torch.randn(batch, length, 3)
            found, wanted = program(x), module(x)
            if isinstance(found, dict):
                found = tuple(found.values())
            torch.testing.assert_close(found, wanted)


GRADIENTS = [
    *("states, stacked", "last alone", "written", "gone over"),
    *("with constants of its own", "turned, and multiplied"),
]


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_those_of_the_loop(name: str, saved_net: SavedNet, tmp_path: Path) -> None:
    _, bundle, code = exported(saved_net, FORMS[name][0], tmp_path / "b")
    for program in bundle.manifest["programs"].values():
        assert program["inputs"][0]["dims"] == ["batch", "length", 3]
    report = api.verify(bundle.folder, model=code)
    assert report.exit_code(strict=True) == 0, report.failures()


# As mamba-minimal has it.
SCAN = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.A_log = nn.Parameter(torch.rand(4, 2))
        self.D = nn.Parameter(torch.ones(4))
        self.x_proj = nn.Linear(4, 4 + 2 + 2)

    def forward(self, x):
        delta, B, C = self.x_proj(x).split([4, 2, 2], dim=-1)
        return self.scan(x, F.softplus(delta), -torch.exp(self.A_log), B, C, self.D)

    def scan(self, u, delta, A, B, C, D):
        b, l, d = u.shape
        decay = torch.exp(torch.einsum("bld,dn->bldn", delta, A))
        given = torch.einsum("bld,bln,bld->bldn", delta, B, u)
        h = torch.zeros((b, d, A.shape[1]), device=u.device)
        ys = []
        for i in range(l):
            h = decay[:, i] * h + given[:, i]
            ys.append(torch.einsum("bdn,bn->bd", h, C[:, i, :]))
        return torch.stack(ys, dim=1) + u * D
"""


def test_a_selective_scan_in_python_has_gradients_in_onnx_runtime(
    saved_net: SavedNet, tmp_path: Path
) -> None:
    _, checkpoint, code = saved_net(SCAN)
    inputs = parse_inputs(["x:[batch,length,4]"])
    bundle = api.export(checkpoint, tmp_path / "b", model=code, inputs=inputs, format="onnx")
    report = api.verify(bundle.folder, model=code, runtime="onnxruntime")
    assert report.exit_code(strict=True) == 0, report.failures()


REFUSED = {
    "its number decides": (
        """
        for t in range(length):
            ys.append(self.a(x[:, t]) if t % 7 != 6 else x[:, t])
        return torch.stack(ys, 1)
""",
        r"goes on otherwise in some of its turns, as net\.py:20 decides",
    ),
    "how many are left decides": (
        """
        for t in range(length):
            h = self.step(h, x[:, t]) if t < length - 1 else x[:, t]
        return h
""",
        r"goes on otherwise in some of its turns, as net\.py:20 decides",
    ),
    "how many are left decides, backwards": (
        """
        for t in reversed(range(length)):
            h = self.step(h, x[:, t]) if t > 0 else x[:, t]
        return h
""",
        r"goes on otherwise in some of its turns, as net\.py:20 decides",
    ),
    "whether any are left decides": (
        """
        for t in reversed(range(length)):
            h = self.step(h, x[:, t]) if t else x[:, t]
        return h
""",
        r"goes on otherwise in some of its turns, as net\.py:20 decides",
    ),
    "a counter decides": (
        """
        n = 0
        for row in x.unbind(1):
            n += 1
            ys.append(self.a(row) if n < 900 else row)
        return torch.stack(ys, 1)
""",
        r"goes on otherwise in some of its turns, as net\.py:22 decides",
    ),
    "how many there are": (
        """
        for row in x.unbind(1):
            ys.append(self.a(row))
        return torch.stack(ys, 1).sum(1) / len(ys)
""",
        "gives something else than the model",
    ),
    "left": (
        """
        for t in range(length):
            h = self.step(h, x[:, t])
            if len(ys) == 2:
                break
            ys.append(h)
        return torch.stack(ys, 1)
""",
        "it is left before its end",
    ),
    "ever more": (
        """
        for t in range(length):
            ys.append(x[:, : t + 1].sum(1))
        return torch.stack(ys, 1)
""",
        "the sizes of aten.slice.Tensor change from turn to turn",
    ),
    "in long steps": (
        """
        for t in range(0, length, 8):
            h = self.step(h, x[:, t])
        return h
""",
        "takes fewer than 4 turns at a size of 16: give an example of 25 or more, --size",
    ),
    "in steps that none takes": (
        """
        for t in range(0, length, 5000):
            h = self.step(h, x[:, t])
        return h
""",
        "takes .* turns",
    ),
    "beside a shorter one": (
        """
        for row, after in zip(x.unbind(1), x[:, 1:].unbind(1)):
            h = self.step(h, row * after)
        return h
""",
        "goes round beside another of another length",
    ),
    "a float decides": (
        """
        for t in range(length):
            h = self.step(h, x[:, t]) if t != 5.0 else x[:, t]
        return h
""",
        r"goes on otherwise in some of its turns, as net\.py:20 decides",
    ),
    "at one size alone": (
        """
        if not torch.compiler.is_exporting() and length != 16:
            raise ValueError(length)
        for t in range(length):
            h = self.step(h, x[:, t])
        return h
""",
        "there are no two sizes at which the model runs",
    ),
    "windows": (
        """
        for t in range(length - 1):
            ys.append(x[:, t : t + 2].sum(1))
        return torch.stack(ys, 1)
""",
        "parts in it that move are longer than 1",
    ),
    "from behind": (
        """
        for t in range(length):
            ys.append(x[:, t - 3])
        return torch.stack(ys, 1)
""",
        "it may go over places before the first",
    ),
    "two turns before": (
        """
        ys = [h, h]
        for t in range(length):
            ys.append(self.step(ys[-2], x[:, t]))
        return torch.stack(ys, 1)
""",
        "its turns take more of others than what the one before left",
    ),
    "one of them": (
        """
        for t in range(length):
            h = self.step(h, x[:, t])
            ys.append(h)
        return ys[1]
""",
        "something of a turn before the last is taken behind it",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_turns_that_are_not_alike_are_refused(
    name: str, saved_net: SavedNet, tmp_path: Path
) -> None:
    body, reason = REFUSED[name]
    with pytest.raises(ExportFailed, match=f"comes out fixed at .*: .*{reason}"):
        exported(saved_net, body, tmp_path / "b", programs="forward", format="torchscript")


def test_a_number_that_a_loop_is_over_is_left_as_it_is(saved_net: SavedNet, tmp_path: Path) -> None:
    """As many turns as the example has, one after the other."""
    _, checkpoint, code = saved_net(HEAD + FORMS["states, stacked"][0])
    inputs = parse_inputs(["x:[batch,5,3]"])
    bundle = api.export(
        checkpoint, tmp_path / "b", model=code, inputs=inputs, programs="forward",
        format="torchscript",
    )  # fmt: skip
    program = torch.jit.load(bundle.folder / "forward.pt")
    assert "for " not in program.code
