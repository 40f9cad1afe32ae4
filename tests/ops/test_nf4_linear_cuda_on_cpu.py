"""The layer's own products on CUDA, which its nodes have, on a CPU that stands in for the GPU.

That these are right for all cases of the op is in `test_onnxruntime_cuda_on_cpu.py`; here are more
rows than a tile has, edges of tiles in all dimensions, sums in parts, and how exact they are.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fuseport.exporter.verify.op_check.symbolic import Session
from fuseport.ops.nf4_linear import SPEC, dequantize_4bit
from fuseport.ops.nf4_linear.cases import _Shape
from fuseport.ops.nf4_linear.storage import QUANT_TYPES
from fuseport.ops.spec import Inputs
from fuseport.tests.ops.cuda_on_cpu import stand_in
from fuseport.tests.ops.cuda_on_cpu.nodes import OnNaN, Runner, by_nodes
from fuseport.tests.ops.cuda_on_cpu.stand_in import DTYPES, Settings

FORWARD, BACKWARD = SPEC.operators
# Of the GPU: with one multiprocessor, more rows than 64 have large tiles.
ONE, MANY = 1, 40
SHAPES = {
    # Two tiles each way, of the last of which a part is there; runs of 16 in a block.
    "large": (_Shape((130,), 144, 133, 64), ONE),
    "large_long": (_Shape((65,), 208, 176, 32), ONE),
    # Blocks, bytes and rows that begin anywhere; then rows of x that are whole packs.
    "odd": (_Shape((129,), 131, 66), ONE),
    "odd_weight": (_Shape((2, 10), 136, 72, 64), ONE),
    "small": (_Shape((67,), 80, 96, 64), MANY),
    "fp4": (_Shape((67,), 80, 96, 64, "fp4"), MANY),
    "fp4_few": (_Shape((3,), 80, 33, 16, "fp4"), ONE),
    # Sums of parts, forward or backward, the last one short.
    "inputs_in_parts": (_Shape((20,), 1040, 70, 64), MANY),
    "outputs_in_parts": (_Shape((17,), 48, 1040, 4096), MANY),
    "one_row_in_parts": (_Shape((1,), 7, 1100), MANY),
}


@pytest.fixture
def settings(fused_library: Path) -> Settings:
    """Skips where ONNX Runtime's headers are not."""
    found = Settings(stand_in.onnxruntime_library())
    found.order(0)
    found.multiprocessors(1)
    return found


def both(run: Runner, inputs: Inputs) -> dict[str, Tensor]:
    """Outputs and gradients; the cotangent is drawn."""
    out = by_nodes(run, SPEC, FORWARD, list(inputs.values()))
    known = {**inputs, **stand_in.cotangents_of(SPEC, FORWARD, inputs, 2)}
    given = [known[name] for name in BACKWARD.inputs]
    return out | by_nodes(run, SPEC, BACKWARD, given)


def expected(inputs: Inputs) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """In float64, of the weight as it is rounded to the dtype of x; and the same of magnitudes."""
    x, bias, dtype = inputs["x"].double(), inputs["bias"].double(), inputs["x"].dtype
    dout = stand_in.cotangents_of(SPEC, FORWARD, inputs, 2)["dout"].double()
    size = (len(bias), inputs["in_features"])
    stored = (inputs["packed"], inputs["absmax"], size, inputs["block_size"])
    weight = dequantize_4bit(*stored, QUANT_TYPES[inputs["quant_type"]])
    weight = weight.to(dtype).double()

    def layer(x: Tensor, dout: Tensor, weight: Tensor, bias: Tensor) -> dict[str, Tensor]:
        dbias = dout.flatten(0, -2).sum(0)
        return {"out": x @ weight.T + bias, "dx": dout @ weight, "dbias": dbias}

    return layer(x, dout, weight, bias), layer(x.abs(), dout.abs(), weight.abs(), bias.abs())


def assert_exact(got: Mapping[str, Tensor], inputs: Inputs) -> None:
    """Rounded once, from sums that are made in float32 or float64."""
    truth, magnitudes = expected(inputs)
    dtype = inputs["x"].dtype
    eps = torch.finfo(dtype).eps
    of_sums = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    for name, value in got.items():
        assert (value.dtype, value.shape) == (dtype, truth[name].shape), name
        allowed = eps / 2 * truth[name].abs() + 8 * of_sums * magnitudes[name]
        allowed += torch.finfo(dtype).smallest_normal * eps
        assert ((value.double() - truth[name]).abs() <= allowed).all(), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_a_product_is_rounded_once_in_any_order_of_threads(
    settings: Settings, name: str, dtype: torch.dtype
) -> None:
    shape, multiprocessors = SHAPES[name]
    inputs = shape.make(dtype, 1)
    settings.multiprocessors(multiprocessors)
    run = Session(None, str(stand_in.onnxruntime_library()), 1)
    found = []
    for order in (0, 1, 7):
        settings.order(order)
        found.append(both(run, inputs))
        for key, value in found[-1].items():
            assert torch.equal(value, found[0][key]), key
    if inputs["x"].shape[:-1].numel() <= 16:  # the weight is not rounded there
        del found[0]["out"]
    assert_exact(found[0], inputs)


@pytest.mark.parametrize(("name", "key"), [("inputs_in_parts", "out"), ("outputs_in_parts", "dx")])
def test_more_multiprocessors_sum_in_parts(settings: Settings, name: str, key: str) -> None:
    """Which float32 shows; and NaN would, in scratch memory that nobody wrote."""
    inputs = SHAPES[name][0].make(torch.float32, 1)
    run = Session(None, str(stand_in.onnxruntime_library()), 1)
    whole = both(run, inputs)
    settings.multiprocessors(MANY)
    assert not torch.equal(both(run, inputs)[key], whole[key])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_inputs_may_lie_askew_in_memory(settings: Settings, dtype: torch.dtype) -> None:
    """One byte, or one number, beyond where a GPU could read packs."""

    class Askew(OnNaN):
        def bind(self, binding: Any, name: str, t: Tensor) -> None:
            kept.append(array := askew(t))
            at = array.ctypes.data
            assert at % 8 != 0
            binding.bind_input(name, "cpu", 0, array.dtype, list(array.shape), at)

    kept: list[np.ndarray[Any, Any]] = []
    inputs = _Shape((33,), 96, 80, 32).make(dtype, 1)
    assert_exact(both(Askew(stand_in.onnxruntime_library()), inputs), inputs)
    assert kept


def askew(t: Tensor) -> np.ndarray[Any, Any]:
    """A copy that begins where no two numbers of it could be read at once."""
    array = t.numpy()
    buffer = np.empty(array.nbytes + 32, np.uint8)
    first = -buffer.ctypes.data % 16 + array.itemsize
    found = buffer[first : first + array.nbytes].view(array.dtype).reshape(array.shape)
    found[...] = array
    return found


@pytest.mark.parametrize("sizes", [(20, 0, 5), (20, 5, 0), (0, 20, 5)])
def test_where_nothing_is_there_to_sum(settings: Settings, sizes: tuple[int, int, int]) -> None:
    rows, in_features, out_features = sizes
    inputs = _Shape((rows,), in_features, out_features).make(torch.bfloat16, 1)
    assert_exact(both(Session(None, str(stand_in.onnxruntime_library()), 1), inputs), inputs)
