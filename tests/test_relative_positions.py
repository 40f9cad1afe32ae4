"""Attention with relative positions, whose scores are shifted by a reshape: squares of sizes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fuseport.exporter import api

# As VITS and Glow-TTS have it: what is padded at the end makes rows one longer, and so shifts them.
CODE = """
import torch
import torch.nn.functional as F
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.near = nn.Parameter(torch.randn(5, 4))

    def forward(self, x):
        batch, length, _ = x.shape
        beside = max(length - 3, 0)
        first = max(3 - length, 0)
        near = F.pad(self.near, (0, 0, beside, beside)) if beside > 0 else self.near
        near = near[first : first + 2 * length - 1]
        rows = F.pad(self.inner(x) @ near.T, (0, 1))
        rows = F.pad(rows.view(batch, length * 2 * length), (0, length - 1))
        scores = rows.view(batch, length + 1, 2 * length - 1)[:, :length, length - 1 :]
        cubes = x.new_ones(length**3).sum() / length**2
        return (scores / cubes).softmax(-1) @ x
"""


@pytest.mark.parametrize("format", ["torchscript", "onnx"])
def test_they_verify_at_any_length(
    format: str, tmp_path: Path, saved_net: Callable[[str], tuple[Any, Path, str]]
) -> None:
    _, checkpoint, model = saved_net(CODE)
    bundle = api.export(
        checkpoint, tmp_path / "b", model=model, inputs=["x:[batch,length,4]"], format=format
    )
    assert "conditions" not in bundle.manifest["programs"]["forward"]
    runtime = "onnxruntime" if format == "onnx" else "torchscript"
    report = api.verify(bundle.folder, model=model, runtime=runtime)
    assert report.exit_code() == 0, report.failures()
    assert {row.program for row in report.results} >= {"forward", "gradient"}
