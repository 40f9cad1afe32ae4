"""Sums over many numbers in ONNX Runtime: as near to float64 as torch's are."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuseport.exporter import formats
from fuseport.exporter.formats._onnx.sums import one_axis_at_a_time
from fuseport.exporter.program import TensorSpec
from fuseport.exporter.program.forward import capture_forward
from fuseport.exporter.program.gradient import capture_gradient
from fuseport.exporter.runtimes import get

NAMES = ("output", "grad/input", "grad/weight", "grad/bias")
SIZES = (2, 4, 50, 50, 50)


class Scaled(nn.Module):
    """By a weight and a bias for each channel, whose gradients are sums over all the rest."""

    def __init__(self, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, 1.0, -1.5, 2.0]))
        self.bias = nn.Parameter(torch.tensor([0.1, 0.0, -0.2, 0.3]))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight, self.bias)


def convolved(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.conv3d(x * weight.view(-1, 1, 1, 1), x.new_ones(4, 1, 1, 1, 1), bias, groups=4)


FUNCTIONS: dict[str, Any] = {
    "instance norm": lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
    "instance norm without a scale": lambda x, w, b: F.instance_norm(x) + b[0] * w[0],
    "group norm": lambda x, w, b: F.group_norm(x, 2, w, b),
    "bias of a convolution": convolved,
    "mean": lambda x, w, b: (x * w.view(-1, 1, 1, 1) + b.view(-1, 1, 1, 1)).mean((0, -1, 3, 2)),
    "sum": lambda x, w, b: (x * w.view(-1, 1, 1, 1)).sum() * b,
    "sum past axes of one": lambda x, w, b: x[None, :, :, None].sum((0, 1, 3, 5)) * b[0] * w[0],
    "variance": lambda x, w, b: x.var((2, 3, 4)) * w + b,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_they_are_as_near_to_float64_as_torchs(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Scaled(FUNCTIONS[name])
    spec = TensorSpec("input", "float32", ("batch", 4, "d", "h", "w"))
    forward = capture_forward(module, {"input": torch.randn(2, 4, 5, 6, 7)}, [spec])
    gradient = capture_gradient(forward)
    x = torch.randn(SIZES) * 1.3 + 0.4
    cotangent = torch.rand_like(module(x))
    plain = computed(module, x, cotangent)
    truth = computed(copy.deepcopy(module).double(), x.double(), cotangent.double())
    found = []
    for program, given in (forward, {}), (gradient, {"cotangent_output": cotangent}):
        file = tmp_path / f"{program.kind}.onnx"
        formats.get("onnx").write(program, file, formats.Options(tmp_path / "w"))
        results = get("onnxruntime").load(file, {}).run({"input": x, **given})
        found.append([results[name].double() for name in NAMES if name in results])
    for results, truths, plains in ((found[0], truth[:1], plain[:1]), (found[1], truth, plain)):
        assert len(results) == len(truths)
        for result, exact, rounded in zip(results, truths, plains, strict=True):
            scale = torch.finfo(torch.float32).eps * exact.abs().max()
            allowed = 4 * (rounded - exact).abs().max() + 8 * scale
            assert (result - exact).abs().max() <= allowed


ROWS: dict[str, Any] = {
    # where the weight and the bias are added up over rows; the names of sizes, and sizes
    "of a size": (("batch", "rows", 4), (2, 9001, 4)),
    "of a batch": (("rows", 4), (20011, 4)),
    "of a number": (("batch", 9000, 4), (2, 9000, 4)),
    "of a prime number": ((8999, 4), (8999, 4)),
    "before two axes": ((4096, "wide", 4), (4096, 3, 4)),
    "none": (("batch", "rows", 4), (2, 0, 4)),
    "one": (("batch", "rows", 4), (1, 1, 4)),
}


@pytest.mark.parametrize("name", ROWS)
def test_many_rows_are_added_up_as_near(name: str, tmp_path: Path) -> None:
    dims, sizes = ROWS[name]
    module = Scaled(lambda x, w, b: x * w + b)
    example = [size if isinstance(size, int) else 5 for size in dims]
    spec = TensorSpec("input", "float32", dims)
    gradient = capture_gradient(capture_forward(module, {"input": torch.randn(example)}, [spec]))
    formats.get("onnx").write(gradient, tmp_path / "g.onnx", formats.Options(tmp_path / "w"))
    torch.manual_seed(0)
    x, cotangent = torch.randn(2, *sizes)
    truth = computed(copy.deepcopy(module).double(), x.double(), cotangent.double())
    given = {"input": x, "cotangent_output": cotangent}
    found = get("onnxruntime").load(tmp_path / "g.onnx", {}).run(given)
    rows = x.numel() // 4
    for result, exact in zip(("grad/weight", "grad/bias"), truth[2:], strict=True):
        allowed = 20 * torch.finfo(torch.float32).eps * (rows + 1) ** 0.5
        assert (found[result].double() - exact).abs().max() <= allowed


def computed(module: nn.Module, x: Tensor, cotangent: Tensor) -> list[Tensor]:
    """The output, and the gradients of the input and of the parameters."""
    x = x.detach().requires_grad_()
    y = module(x)
    into = [x, *module.parameters()]
    return [y.detach(), *torch.autograd.grad(y, into, cotangent, materialize_grads=True)]


BODIES = {
    # what is computed of x (a, b, 5) and y (1, b, 5); how many sums it takes then
    "s = ReduceSum <keepdims = 0> (x, all)": 3,
    "s = ReduceSum <keepdims = 0> (y, all)": 2,
    "s = ReduceMean <keepdims = 1> (y, all)": 2,
    "z = Mul (x, y) s = ReduceSum <keepdims = 0> (z, all)": 3,
    "z = Mul (y, y) s = ReduceSum <keepdims = 0> (z, all)": 2,
    "m = ReduceMean <keepdims = 1> (x, last) s = ReduceSum <keepdims = 0> (m, all)": 3,
    "m = ReduceMean <keepdims = 1> (y, last) z = Sub (y, m) s = ReduceSum (z, all)": 3,
    "m = ReduceMean <keepdims = 0> (x, last) s = ReduceSum (m, front)": 3,
    "s = ReduceSum (x, last)": 1,
    "s = ReduceSum (y, front)": 1,
}


@pytest.mark.parametrize("body", BODIES)
def test_sums_are_parted_by_axes_that_have_more_than_one(body: str) -> None:
    text = f"""
        <ir_version: 10, opset_import: ["" : 20]>
        sums (float[a, b, 5] x, float[1, b, 5] y) => (float[] s)
        <int64[3] all = {{0, 1, -1}}, int64[1] last = {{2}}, int64[2] front = {{0, 1}}>
        {{ {body} }}
    """
    proto = onnx.parser.parse_model(text)
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    model = ir.serde.deserialize_model(proto)
    one_axis_at_a_time(model)
    assert sum(node.op_type.startswith("Reduce") for node in model.graph) == BODIES[body]
    x, y = torch.randn(2, 3, 5).numpy(), torch.randn(1, 3, 5).numpy()
    before, after = (
        onnxruntime.InferenceSession(each.SerializeToString()).run(None, {"x": x, "y": y})[0]
        for each in (proto, ir.serde.serialize_model(model))
    )
    assert before.shape == after.shape
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-5)
