"""Convolutions in a number of groups that is a size, in every format."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fuseport.exporter import api
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.program.portable import _grouped

# Filters of each sample's own, as StyleGAN2 has them.
NET = """
import torch
import torch.nn.functional as F
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, 4, 3, 3, 3) / 3)
        self.style = nn.Linear(5, 3)

    def forward(self, x, w):
        b, c, height, width = x.shape
        weight = self.weight * self.style(w).view(b, 1, c, 1, 1)
        weight = weight * torch.rsqrt(weight.pow(2).sum([2, 3, 4]) + 1e-8).view(b, 4, 1, 1, 1)
        x = x.reshape(1, b * c, height, width)
        x = F.conv2d(x, weight.view(b * 4, c, 3, 3), padding=1, groups=b)
        up = F.conv_transpose2d(x, weight.view(b * 4, c, 3, 3), stride=2, groups=b)
        return up.view(b, c, *up.shape[2:])
"""


class Size(int):
    """In the place of a `torch.SymInt`."""


@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_they_are_those_of_torch(
    dims: int, stride: int, padding: int, dilation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(torch, "SymInt", Size)
    x = torch.randn(2, 6, *(9, 10, 8)[:dims], dtype=torch.float64)
    bias = torch.randn(12, dtype=torch.float64)
    weight = torch.randn(12, 2, *(3, 4, 1)[:dims], dtype=torch.float64)
    given: tuple[Any, ...] = (stride, padding, dilation)
    expected = getattr(F, f"conv{dims}d")(x, weight, bias, *given, 3)
    found = _grouped.convolution(x, weight, bias, *([n] for n in given), Size(3))
    torch.testing.assert_close(found, expected)
    weight = torch.randn(6, 4, *(3, 4, 1)[:dims], dtype=torch.float64)
    more = max(stride, dilation) - 1
    given = (stride, padding, more)
    expected = getattr(F, f"conv_transpose{dims}d")(x, weight, bias, *given, 3, dilation)
    found = _grouped.transposed_convolution(
        x, weight, bias, *([n] for n in given), Size(3), [dilation]
    )
    torch.testing.assert_close(found, expected)
    monkeypatch.undo()
    assert _grouped.convolution(x, weight, bias, [1], [0], [1], 3) is NotImplemented


def test_a_filter_for_each_sample_holds_in_onnx(
    tmp_path: Path, saved_with: Callable[..., tuple[Path, str]]
) -> None:
    checkpoint, model = saved_with(NET)
    state = {
        "weight": torch.randn(1, 4, 3, 3, 3) / 3,
        **{f"style.{k}": t for k, t in torch.nn.Linear(5, 3).state_dict().items()},
    }
    torch.save(state, checkpoint)
    options = {
        "model": model,
        "inputs": parse_inputs(["x:[batch,3,h,w]", "w:[batch,5]"]),
        "format": ["onnx"],
    }
    bundle = api.export(checkpoint, tmp_path / "b", **options)
    report = api.verify(bundle.folder, model=model)
    assert report.exit_code() == 0, report.failures()
    compared = {row.runtime for row in report.results if row.verdict == "pass"}
    assert compared >= {"eager", "onnxruntime"}
