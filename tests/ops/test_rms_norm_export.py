"""A model with both norms, exported: ONNX Runtime runs its gradients, by bodies or fused."""

from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from fuseport.exporter import formats
from fuseport.exporter.program import TensorSpec
from fuseport.exporter.program.forward import capture_forward
from fuseport.exporter.program.gradient import capture_gradient
from fuseport.ops import onnxruntime_library, register
from fuseport.ops.rms_norm import rms_norm
from fuseport.ops.rms_norm_gated import rms_norm_gated

NODES = ["rms_norm", "rms_norm_backward", "rms_norm_gated", "rms_norm_gated_backward"]


class Block(nn.Module):
    """Both norms, each with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.second = nn.Parameter(torch.linspace(1.5, 0.5, 8))
        self.project = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        y, z = self.project(rms_norm(x, self.first)).chunk(2, -1)
        return rms_norm_gated(y, z, self.second, 1e-5, 4, False)


@pytest.mark.parametrize("fused", [False, True])
def test_the_gradient_program_in_onnxruntime(
    tmp_path: Path, fused: bool, request: pytest.FixtureRequest
) -> None:
    register("rms_norm", "rms_norm_gated")
    torch.manual_seed(0)
    model = Block().eval()
    specs = (TensorSpec("x", "float32", ("batch", "length", 8)),)
    forward = capture_forward(model, {"x": torch.randn(2, 16, 8)}, specs)
    gradient = capture_gradient(forward)
    file = tmp_path / "gradient.onnx"
    formats.get("onnx").write(gradient, file, formats.Options(tmp_path / "w"))
    graph = onnx.load(file).graph
    assert sorted(n.op_type for n in graph.node if n.domain == "fuseport.ops") == NODES

    options = onnxruntime.SessionOptions()
    if fused:
        request.getfixturevalue("fused_library")
        options.register_custom_ops_library(str(onnxruntime_library()))
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    for b, l in ((1, 1), (3, 7)):  # noqa: E741
        x = torch.randn(b, l, 8, requires_grad=True)
        out = model(x)
        dout = torch.randn_like(out)
        leaves = {"x": x, **dict(model.named_parameters())}
        gradients = torch.autograd.grad(out, list(leaves.values()), dout)
        expected = [out.detach(), *gradients]
        feed = [x.detach().numpy(), dout.numpy()]
        names = [i.name for i in session.get_inputs()]
        got = session.run(None, dict(zip(names, feed, strict=True)))
        for name, value, wanted in zip(["out", *leaves], got, expected, strict=True):
            torch.testing.assert_close(
                torch.from_numpy(value), wanted, rtol=1e-4, atol=1e-5, msg=name
            )
