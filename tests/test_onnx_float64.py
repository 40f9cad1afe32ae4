"""Numbers of float64 in ONNX, which torch.onnx has in float32, in branches and turns, too."""

import math
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._higher_order_ops.scan import scan

from fuseport.exporter.formats._onnx.float64 import factors_apart
from fuseport.tests.test_onnx_plain import assert_holds


def _branches(x: Tensor) -> Tensor:
    def one(x: Tensor) -> Tensor:
        return x * 0.1 + math.floor(x.shape[2] * 0.857142856) * x.sin()

    def other(x: Tensor) -> Tensor:
        return F.softplus(x, 0.7, 3.3) / math.ceil(x.shape[3] * 0.555555557)

    return torch.cond(x.sum() > 0, one, other, (x,)) + torch.cond(x.sum() > 0, other, one, (x,))


def _turns(x: Tensor) -> Tensor:
    whole = x.shape[2]

    def turn(state: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        state = state * 0.9 + row * math.floor(whole * 0.857142856) / (whole + 0.1)
        return state, F.elu(state, 0.3)

    _, found = scan(turn, torch.zeros_like(x[0]), x)
    return found


IN_FLOAT64 = {
    "operands": lambda x: (0.1 - x * 0.7) / 3 + 1.7 ** (0.1 * x),
    "scales": lambda x: torch.add(x, x.sin(), alpha=0.1) + torch.lerp(x, x.cos(), 0.3),
    "bounds": lambda x: x.clamp(0.1, 0.7) + torch.where(x > 0.3, 0.1, x) + F.softshrink(x, 0.3),
    "fills": lambda x: x * torch.full_like(x, 0.1) + torch.arange(12, dtype=x.dtype).sum() * 0.1,
    "sizes": lambda x: F.mse_loss(x, x.sin()) + x * (2.1 / x.shape[2]),
    "layer norm": lambda x: F.layer_norm(x.permute(0, 2, 3, 1), (3,)),
    "group norm": lambda x: F.group_norm(x, 3, x.new_tensor([0.3, 1.0, 2.0])),
    "batch norm": lambda x: F.batch_norm(x, x.new_tensor([0.1, 1, 2]), x.new_tensor([1.0, 2, 3])),
    "instance norm": lambda x: F.instance_norm(x * 0.01),
    "RMS norm": lambda x: F.rms_norm(x.permute(0, 2, 3, 1), (3,), eps=1e-5),
    "activations": lambda x: F.softplus(x, 0.7, 3.3) + F.elu(x, 0.3) + F.leaky_relu(x, 0.01),
    "more of them": lambda x: F.gelu(x, approximate="tanh") + F.celu(x, 0.3) + F.selu(x),
    "hard ones": lambda x: F.hardswish(x) + F.mish(x) + F.prelu(x, x.new_tensor([0.2])),
    "logarithms": lambda x: torch.log2(x.abs() + 0.1) + torch.log10(x.abs() + 0.1) + x.sinc(),
    "beside float32": lambda x: x * 0.1 + (x > 0.3) * 0.1 + x.float() * 0.7 + x * 0.7,
    "branches": _branches,
    "turns": _turns,
    "products": lambda x: 0.1 * x @ x.mT / 3 + ((x @ (x * 0.7).mT) * 0.3) @ (x / 7 @ x.mT),
    "attention": lambda x: F.scaled_dot_product_attention(x, x.cos(), x),
}


@pytest.mark.parametrize("name", IN_FLOAT64)
def test_numbers_of_float64_are_not_rounded_to_float32(name: str, tmp_path: Path) -> None:
    assert_holds(IN_FLOAT64[name], tmp_path, torch.float64)


def test_a_product_by_a_matrix_that_is_in_the_file_stays_as_it_is() -> None:
    x = ir.val("x", ir.DataType.DOUBLE, (2, 2))
    matrix = ir.node("Constant", [], {"value": ir.tensor(np.eye(2))})
    product = ir.node("MatMul", [x, matrix.outputs[0]])
    product.outputs[0].dtype = ir.DataType.DOUBLE
    opsets = {"": 20}
    graph = ir.Graph([x], product.outputs, nodes=[matrix, product], opset_imports=opsets)
    factors_apart(ir.Model(graph, ir_version=10))
    assert [*graph] == [matrix, product]
