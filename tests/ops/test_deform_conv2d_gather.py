"""The backward of deformable convolution on CUDA in batches, NaN and Inf, and parts of sums.

`cuda_on_cpu/` stands in for the GPU.
"""

import ctypes
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fuseport.ops.deform_conv2d import SPEC
from fuseport.ops.deform_conv2d.cases import _Shape
from fuseport.ops.spec import Case, Inputs
from fuseport.tests.ops.cuda_on_cpu import stand_in
from fuseport.tests.ops.cuda_on_cpu.stand_in import Device

OPERATOR = SPEC.operator("deform_conv2d_modulated")
GRADIENT = SPEC.operator("deform_conv2d_modulated_backward")
THREE = _Shape(b=3, c=16, padding=(1, 1), groups=2, offset_groups=2)


@pytest.fixture
def device() -> Iterator[Device]:
    with stand_in.device(SPEC) as found:
        yield found


def with_cotangent(shape: _Shape, dtype: torch.dtype = torch.float32) -> Inputs:
    inputs = shape.make(dtype, 1)
    return stand_in.cotangents_of(SPEC, OPERATOR, inputs, 2) | inputs


def in_batches(inputs: Inputs, at_once: int) -> tuple[Tensor, ...]:
    names = ("dout", "input", "offset", "mask", "weight")
    given = [inputs[name].contiguous() for name in names]
    x, weight = inputs["input"], inputs["weight"]
    sizes = [*x.shape, weight.shape[0], *weight.shape[2:], x.shape[1] // weight.shape[1], 0, 0, 0]
    sizes[-3] = inputs["mask"].shape[1] // weight.shape[2:].numel()
    sizes[-2:] = inputs["dout"].shape[2:]
    results = tuple(torch.full_like(t, math.nan) for t in (*given[1:], inputs["bias"]))
    library = stand_in.host(SPEC, "batches.cpp")
    library.backward_in_batches.restype = ctypes.c_char_p
    error = library.backward_in_batches(
        (ctypes.c_int64 * len(sizes))(*sizes),
        (ctypes.c_void_p * 10)(*(t.data_ptr() for t in (*given, *results))),
        ctypes.c_int64(at_once),
    )
    assert error is None, error
    return results


def test_bits_do_not_depend_on_how_many_batch_entries_are_taken_at_once(device: Device) -> None:
    shape = _Shape(b=3, c=16, padding=(0, 0), groups=2, offset_groups=2)
    inputs = with_cotangent(shape)
    for axis in "hw":  # as the problem of batches.cpp has them
        assert (inputs[f"padding_{axis}"], inputs[f"stride_{axis}"]) == (0, 1)
    runs = [in_batches(inputs, at_once) for at_once in (3, 2, 1)]
    runs.append(device(GRADIENT, *inputs.values()))
    for other in runs[1:]:
        for one, another in zip(runs[0], other, strict=True):
            assert torch.equal(one, another)


@pytest.mark.parametrize("dtype", stand_in.DTYPES, ids=str)
def test_runs_of_channels_and_the_gradient_of_the_weight_in_parts(
    device: Device, dtype: torch.dtype
) -> None:
    """Whose number depends on the GPU; in none does the order of threads count."""
    shape = _Shape(b=2, c=16, o=10, image=(9, 8), offset_groups=2)
    for multiprocessors in (1, 40):
        device.multiprocessors(multiprocessors)
        runs = []
        for order in (0, 1, 2):
            device.order(order)
            runs.append(stand_in.check(device, Case("runs", OPERATOR.name, shape.make), dtype))
        for tensor, value in runs[0].items():
            assert all(torch.equal(run[tensor], value) for run in runs), tensor


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("tensor", ["input", "offset", "mask", "weight", "bias", "dout"])
@pytest.mark.parametrize("shape", [THREE, _Shape()], ids=["runs", "numbers"])
def test_nan_and_inf_spread_as_in_the_reference(
    device: Device, shape: _Shape, tensor: str, value: float
) -> None:
    inputs = with_cotangent(shape)
    flat = inputs[tensor].view(-1)
    flat[len(flat) // 2] = value
    cotangents = {"dout": inputs.pop("dout")}
    got = device.forward_and_backward(OPERATOR, inputs, cotangents)
    expected = stand_in.forward_and_backward(
        SPEC, stand_in.by_reference, OPERATOR, inputs, cotangents
    )
    for key, y in got.items():
        assert torch.equal(y.isnan(), expected[key].isnan()), key
        assert torch.equal(y.isposinf(), expected[key].isposinf()), key
        assert torch.equal(y.isneginf(), expected[key].isneginf()), key
