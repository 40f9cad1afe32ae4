"""Code that decides by values, and makes numbers of dynamic sizes or goes over one elsewhere."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fuseport.exporter import api
from fuseport.exporter.bundle import Bundle
from fuseport.exporter.capture import attempts
from fuseport.exporter.errors import ExportFailed
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.program import Program
from fuseport.exporter.program.forward import capture_forward
from fuseport.tests.by_autograd import assert_same

SavedNet = Callable[[str], tuple[nn.Module, Path, str]]

CODE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 3)

    def forward(self, x):
"""

FORMS = {
    "a number, asserted": """
        assert not torch.isnan(x).any()
        return self.a(x)[:, : int(x.shape[1] * 0.5) + 1]
""",
    "a number, both ways": """
        y = self.a(x)[:, int(x.shape[1] / 3) :]
        if x.mean() > 0:
            y = y * 2
        return y
""",
    "a number on one way alone": """
        y = self.a(x)
        if x.mean() > 0:
            y = y + y[:, int(x.shape[1] / 3)][:, None]
        return y
""",
    "a loop, asserted": """
        assert not torch.isnan(x).any()
        h = x[:, 0]
        steps = []
        for t in range(x.shape[1]):
            h = torch.tanh(self.a(h) + x[:, t])
            steps.append(h)
        return torch.stack(steps, 1)
""",
    "a loop, both ways": """
        h = torch.zeros_like(x[:, 0])
        for t in range(x.shape[1]):
            h = torch.tanh(self.a(h) + x[:, t])
        if x.mean() > 0:
            h = h * 2
        return h
""",
}


def exported(saved_net: SavedNet, form: str, folder: Path) -> tuple[nn.Module, Bundle]:
    module, checkpoint, code = saved_net(CODE + form)
    inputs = parse_inputs(["x:[batch,length,3]"])
    bundle = api.export(
        checkpoint, folder / "b", model=code, inputs=inputs, format="exported_program"
    )
    return module, bundle


@pytest.mark.parametrize("name", FORMS)
def test_sizes_stay_dynamic(name: str, saved_net: SavedNet, tmp_path: Path) -> None:
    module, bundle = exported(saved_net, FORMS[name], tmp_path)
    program = torch.export.load(bundle.folder / "gradient.pt2").module()
    for length in (1, 2, 5, 11, 16, 40):
        for shift in (-9.0, 9.0):
            x = torch.randn(2, length, 3) + shift
            _, cotangent = assert_same(program, module, x, atol=1e-4)
    if "asserted" in name:
        with pytest.raises(RuntimeError, match="AssertionError"):
            program(torch.full_like(x, torch.nan), cotangent)


ONE_WAY = {
    "of a decision": """
        y = self.a(x)[:, int(x.shape[1] / 3) :]
        if x.mean() > 5:
            half = int(x.shape[1] / 2)
            assert isinstance(half, int)
            y = y * half
        return y
""",
    "of a branch": """
        blocks = x.shape[1] // 8
        sizes = {1: 2.0, 2: 3.0}
        return torch.cond(x.mean() > 5, lambda x: x * sizes[blocks], torch.tanh, (self.a(x),))
""",
}
CONDITIONS = {"of a decision": ["16 <= length <= 17"], "of a branch": ["16 <= length <= 23"]}


@pytest.mark.parametrize("name", ONE_WAY)
def test_sizes_that_one_way_alone_excludes_are_no_artifacts(
    name: str, saved_net: SavedNet, tmp_path: Path
) -> None:
    """No input that is drawn goes it."""
    module, bundle = exported(saved_net, ONE_WAY[name], tmp_path)
    assert bundle.manifest["programs"]["forward"]["conditions"] == CONDITIONS[name]
    program = torch.export.load(bundle.folder / "forward.pt2").module()
    for length in (16, 17):
        for shift in (-9.0, 9.0):
            x = torch.randn(2, length, 3) + shift
            torch.testing.assert_close(program(x), module(x))


@pytest.mark.parametrize(
    ("form", "most"),
    [
        ("assert not torch.isnan(x).any()", 2),
        ("if x.mean() > 0: pass", 3),
        ("x = x * 2 if x.mean() > 0 else x", 3),
    ],
)
def test_no_way_is_captured_twice(
    form: str, most: int, saved_net: SavedNet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the first capture, which ends where the code decides."""
    calls = []

    def counting(*args: Any) -> Program:
        calls.append(args)
        return capture_forward(*args)

    monkeypatch.setattr(attempts, "capture_forward", counting)
    exported(saved_net, f"        {form}\n        return self.a(x)\n", tmp_path)
    assert len(calls) == most


def test_a_decision_in_a_loop_is_told_by_its_place(saved_net: SavedNet, tmp_path: Path) -> None:
    form = """
        h = x[:, 0]
        for t in range(x.shape[1]):
            if h.isnan().any():
                raise ValueError("nothing left")
            h = torch.tanh(self.a(h) + x[:, t])
        return h
"""
    with pytest.raises(ExportFailed, match=r"loop at net.py:13 .*: net.py:14 in it decides by"):
        exported(saved_net, form, tmp_path)
