"""Decisions that spare work where there is none, as of experts that nothing is sent to."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from fuseport.exporter import api
from fuseport.exporter.capture.decisions import Decision, Run
from fuseport.exporter.capture.guards import guards, natural
from fuseport.exporter.models.user import parse_inputs

EXPERTS = """
import torch
from torch import nn

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(6, 4)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            sent = (chosen == i).any(-1)
            {guard}
                out[sent] += expert(x[sent]) * (weights * (chosen == i))[sent].sum(-1, keepdim=True)
        return out

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.norm, self.two = Experts(), nn.LayerNorm(6), Experts()

    def forward(self, x):
        return self.two(self.norm(self.one(x)))
"""


@pytest.mark.parametrize(
    "guard", ["if sent.any():", "if not sent.any():\n                continue\n            else:"]
)
def test_experts_that_nothing_is_sent_to_are_in_the_programs(
    guard: str,
    saved_net: Callable[[str], tuple[nn.Module, Path, str]],
    tmp_path: Path,
) -> None:
    module, checkpoint, code = saved_net(EXPERTS.replace("{guard}", guard))
    inputs = parse_inputs(["x:[batch,6]"])
    bundle = api.export(checkpoint, tmp_path / "b", model=code, inputs=inputs, format="onnx")
    said = "decides by a value: the way of True is in the programs, which is right for both"
    assert any(said in note for note in bundle.manifest["notes"])
    report = api.verify(bundle.folder, model=code, runtime=["eager", "onnxruntime"])
    assert report.exit_code(strict=True) == 0, report.failures()
    session = onnxruntime.InferenceSession(bundle.folder / "forward.onnx")
    for count in (1, 50):
        x = torch.randn(count, 6)
        (found,) = session.run(None, {"x": x.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), module(x).detach())


def deciding(natural: bool, outputs: Mapping[bool, float]) -> Run:
    """A model that decides once, and gives a number by what comes of it."""

    def run(answers: Mapping[str, bool]) -> tuple[Sequence[Decision], Sequence[Tensor]]:
        value = answers.get("net.py:3, 0", natural)
        return [Decision("net.py:3", 0, value)], [torch.tensor(outputs[value])]

    return run


def failing(answers: Mapping[str, bool]) -> tuple[Sequence[Decision], Sequence[Tensor]]:
    raise ValueError("a size that the model does not take")


def test_only_what_gives_the_same_both_ways_is_one() -> None:
    sent, none = deciding(True, {True: 2.0, False: 0.0}), deciding(False, {True: 1.0, False: 1.0})
    assert guards(natural([sent, failing, none]))["net.py:3, 0"] is True
    skipped = [deciding(False, {False: 2.0, True: 0.0}), deciding(True, {True: 1.0, False: 1.0})]
    assert guards(natural(skipped))["net.py:3, 0"] is False
    other = deciding(False, {True: 1.5, False: 1.0})
    assert guards(natural([sent, none, other])) == {}
    assert guards(natural([sent, sent])) == {}  # nothing tells what comes of it otherwise
    assert guards(natural([failing])) == {}


TABLES = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(6, 2)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.register_buffer("table", torch.linspace(1, 2, 6), persistent=False)

    def forward(self, x):
        if self.table[0] == 0:  # lost where the model was made of no device
            self.table = torch.linspace(1, 2, 6)
        x = x * self.table
        weights, chosen = self.gate(x).softmax(-1).topk(1, -1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            sent = chosen == i
            if sent.any():
                rows = sent.any(-1).nonzero().flatten()
                out.index_add_(0, rows, expert(x[rows]) * weights[sent].view(-1, 1))
        return out if out.mean() < 0.1 else out.tanh()
"""


def test_what_torch_asserts_of_sizes_and_decisions_by_buffers_stand_in_no_way(
    saved_net: Callable[[str], tuple[nn.Module, Path, str]], tmp_path: Path
) -> None:
    """As in MiniMind: rows that are counted in two ways, and a table that is made again if lost."""
    _, checkpoint, code = saved_net(TABLES)
    inputs = parse_inputs(["x:[batch,6]"])
    bundle = api.export(checkpoint, tmp_path / "b", model=code, inputs=inputs, format="onnx")
    notes = [note for note in bundle.manifest["notes"] if "decides by a value" in note]
    guard = "the way of True is in the programs, which is right for both (1 times more)"
    assert notes == [
        f"net.py:20 decides by a value: {guard}",
        "net.py:23 decides by a value: both ways are in the programs",
    ]
    report = api.verify(bundle.folder, model=code, runtime=["eager", "onnxruntime"])
    assert report.exit_code(strict=True) == 0, report.failures()
