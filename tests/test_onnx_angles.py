"""Angles in ONNX, on axes too."""

import itertools
import math
from pathlib import Path

import torch
from torch import Tensor, nn

from fuseport.exporter.program import TensorSpec
from fuseport.exporter.program.forward import capture_forward
from fuseport.tests.as_files import session_of

AXES = [*(0.0, 1.0, 3e-20, 2e20, math.inf), *(-0.0, -1.0, -3e-20, -2e20, -math.inf), math.nan]


class Angles(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y, x = x.unbind(-1)
        return torch.atan2(y, x), torch.complex(x, y).angle(), torch.atan2(y, x.new_tensor(-2.0))


def test_angles_are_torchs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    spec = TensorSpec("x", "float32", ("points", 2))
    program = capture_forward(Angles(), {"x": torch.randn(5, 2)}, [spec])
    points = torch.tensor([*itertools.product(AXES, AXES)])
    points = torch.cat([points, torch.randn(50, 2)])
    found = session_of(program, tmp_path, "onnxruntime").run({"x": points})
    for result, wanted in zip(found.values(), Angles()(points), strict=True):
        torch.testing.assert_close(result, wanted, equal_nan=True)
