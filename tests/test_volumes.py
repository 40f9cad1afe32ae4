"""`grid_sample` of volumes, which torch and ONNX take apart no further: against torch's own."""

from pathlib import Path

import pytest
import torch

from fuseport.exporter import api
from fuseport.exporter.models.user import parse_inputs
from fuseport.exporter.program.portable.volumes import grid_sampler_3d


@pytest.mark.parametrize("mode", [0, 1], ids=["bilinear", "nearest"])
@pytest.mark.parametrize("padding", [0, 1, 2], ids=["zeros", "border", "reflection"])
@pytest.mark.parametrize("align_corners", [True, False])
def test_it_is_torchs(mode: int, padding: int, align_corners: bool) -> None:
    for seed, size in enumerate([(3, 4, 5), (1, 2, 1)]):
        torch.manual_seed(seed)
        x = torch.randn(2, 3, *size, dtype=torch.float64, requires_grad=True)
        grid = 1.5 * torch.randn(2, 2, 3, 4, 3, dtype=torch.float64)
        grid.requires_grad_()
        results, gradients = [], []
        for function in (torch.ops.aten.grid_sampler_3d.default, grid_sampler_3d):
            results.append(function(x, grid, mode, padding, align_corners))
            gradients.append(
                torch.autograd.grad(
                    results[-1], (x, grid), results[0].detach().cos(), materialize_grads=True
                )
            )
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*gradients)


CODE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2, 1, 1, 1))

    def forward(self, x, grid):
        return nn.functional.grid_sample(x * self.scale, grid, align_corners=False)
"""


def test_a_warp_of_volumes_verifies(tmp_path: Path) -> None:
    code = tmp_path / "warp.py"
    code.write_text(CODE)
    torch.save({"scale": torch.rand(2, 1, 1, 1)}, tmp_path / "warp.pth")
    bundle = api.export(
        tmp_path / "warp.pth",
        tmp_path / "b",
        model=f"{code}:Net",
        inputs=parse_inputs(["x:[batch,2,3,4,2]", "grid:[batch,2,3,1,3]"]),
        format=["onnx"],
    )
    report = api.verify(bundle.folder, model=f"{code}:Net", runtime=["onnxruntime"])
    assert report.exit_code(strict=True) == 0, report.failures()
    assert {row.program for row in report.results} == {"forward", "gradient"}
