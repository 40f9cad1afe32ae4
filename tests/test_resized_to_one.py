"""Resizing from corner to corner, which torch has no ratio of where one place is left."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuseport.exporter import formats
from fuseport.exporter.program import TensorSpec
from fuseport.exporter.program.conditions import admits
from fuseport.exporter.program.forward import capture_forward
from fuseport.exporter.program.gradient import capture_gradient
from fuseport.exporter.runtimes import get

SPECS = (
    TensorSpec("x", "float32", ("batch", 3, "h", "w")),
    TensorSpec("like", "float32", ("batch", "k", "l")),
)
resized = partial(F.interpolate, align_corners=True)

RESIZED = {
    "bilinear": lambda x, k, m: resized(x, (k, m), mode="bilinear"),
    "bicubic": lambda x, k, m: resized(x, (k, m), mode="bicubic"),
    "linear": lambda x, k, m: resized(x.flatten(2), m, mode="linear"),
    "trilinear": lambda x, k, m: resized(x[:, :, None], (k, k, m), mode="trilinear"),
    "of a mean": lambda x, k, m: resized(F.adaptive_avg_pool2d(x, 1), (k, m), mode="bilinear"),
}


class Resized(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor, like: Tensor) -> Tensor:
        return RESIZED[self.name](x, *like.shape[1:])


@pytest.mark.parametrize("name", RESIZED)
def test_resizing_from_corner_to_corner_may_leave_one_place(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Resized(name)
    examples = {"x": torch.randn(2, 3, 6, 8), "like": torch.randn(2, 9, 5)}
    forward = capture_forward(module, examples, SPECS)
    gradient = capture_gradient(forward)
    for program in (forward, gradient):
        assert admits(program, {"batch": 1, "h": 1, "w": 3, "k": 1, "l": 1})
        file = tmp_path / f"{program.kind}.onnx"
        formats.get("onnx").write(program, file, formats.Options(tmp_path / "w"))
    for h, w, k, m in ((6, 8, 1, 5), (4, 3, 1, 1), (1, 5, 7, 1), (3, 7, 12, 4)):
        x, like = torch.randn(2, 3, h, w, requires_grad=True), torch.zeros(2, k, m)
        y = module(x, like)
        dy = torch.randn_like(y)
        (dx,) = torch.autograd.grad(y, x, dy)
        given = {"x": x.detach(), "like": like, "cotangent_output": dy}
        for program in (forward, gradient):
            inputs = {spec.name: given[spec.name] for spec in program.inputs}
            found = get("onnxruntime").load(tmp_path / f"{program.kind}.onnx", {}).run(inputs)
            torch.testing.assert_close(found["output"], y.detach())
            plain = program.exported.module(check_guards=False)(*inputs.values())
            torch.testing.assert_close(plain["output"] if len(inputs) > 2 else plain, y.detach())
        torch.testing.assert_close(found["grad/x"], dx)
        torch.testing.assert_close(plain["grad/x"], dx)
