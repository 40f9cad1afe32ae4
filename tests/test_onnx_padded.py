"""What is padded before a pool is padded so in ONNX Runtime, too, which has the pool pad else."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuseport.exporter import formats
from fuseport.exporter.program import TensorSpec
from fuseport.exporter.program.forward import capture_forward
from fuseport.exporter.program.gradient import capture_gradient
from fuseport.exporter.runtimes import get


class Padded(nn.Module):
    def __init__(self, by: str) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        match self.by:
            case "the same size":
                return F.max_pool2d(F.pad(x, (0, 1, 0, 1)), 3, 2)
            case "more than a window":
                return F.max_pool2d(F.pad(x, (4, 4, 5, 3)), 3, 2, 1)
            case "a row":
                return F.max_pool1d(F.pad(x.flatten(2), (1, 1)), 2, 1, padding=1)
            case "a mean":
                padded = F.pad(x, (2, 2, 2, 2))
                return F.avg_pool2d(padded, 3, 2, 1, count_include_pad=True)
        return F.max_pool2d(F.pad(x, (1, 1), value=-9.0), 2) + F.pad(x, (1, 1)).amax()


WAYS = ("the same size", "more than a window", "a row", "a mean", "another number")


@pytest.mark.parametrize("by", WAYS)
def test_what_is_padded_is_zero_to_a_pool(by: str, tmp_path: Path) -> None:
    """As TensorFlow pads: a window of negative numbers has a larger one in it then."""
    spec = TensorSpec("x", "float32", ("batch", 2, "height", "width"))
    module = Padded(by)
    forward = capture_forward(module, {"x": torch.randn(2, 2, 8, 6)}, [spec])
    for program in (forward, capture_gradient(forward)):
        file = tmp_path / f"{program.kind}.onnx"
        formats.get("onnx").write(program, file, formats.Options(tmp_path / "w.safetensors"))
        for shape in (3, 2, 6, 8), (1, 2, 7, 9):
            x = -torch.rand(shape).requires_grad_()
            expected = module(x)
            cotangent = torch.randn(expected.shape)
            given = {"x": x.detach(), "cotangent_output": cotangent}
            names = ("inputs", "outputs")
            entry = {n: [{"name": spec.name} for spec in getattr(program, n)] for n in names}
            session = get("onnxruntime").load(file, {"kind": program.kind, **entry})
            found = session.run({spec.name: given[spec.name] for spec in program.inputs})
            torch.testing.assert_close(found["output"], expected)
            if program.kind == "gradient":
                (wanted,) = torch.autograd.grad(expected, [x], cotangent)
                torch.testing.assert_close(found["grad/x"], wanted)
