"""The four-bit layer's products of few rows on tensor cores, on a CPU that stands in for the GPU.

It is of groups of 64 in a row, in blocks of 64 and more; the op's cases are mostly of other shapes.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from fuseport.ops.nf4_linear import SPEC, dequantize_4bit
from fuseport.ops.nf4_linear.cases import _Shape
from fuseport.ops.nf4_linear.storage import QUANT_TYPES
from fuseport.ops.spec import Inputs
from fuseport.tests.ops.cuda_on_cpu import stand_in
from fuseport.tests.ops.cuda_on_cpu.stand_in import Device

FORWARD, BACKWARD = SPEC.operators
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of the GPU: with one multiprocessor, tiles are wide, and a block has them all in turn.
ONE, MANY = 1, 40
SHAPES = {
    # Tiles of eight rows, of sixteen, and parts of them.
    **{f"rows_{n}": (_Shape((n,), 192, 41, 64), ONE) for n in (1, 2, 7, 8, 9, 15, 16, 17, 33, 64)},
    "narrow": (_Shape((3, 3), 192, 41, 64), MANY),
    "narrow_few": (_Shape((2,), 192, 41, 64), MANY),
    "one_tile": (_Shape((5,), 64, 16, 64), ONE),
    # Blocks that go over the edges of rows, and of the whole weight.
    "blocks_over_rows": (_Shape((4,), 320, 33, 128), ONE),
    "one_block": (_Shape((16,), 128, 24, 4096), ONE),
    # As many groups as a block has warps, and some more; then sums of parts, the last one short.
    "groups_17": (_Shape((9,), 1088, 40, 64), ONE),
    "parts": (_Shape((2,), 64 * 261, 16, 64), MANY),
    "fp4": (_Shape((9,), 192, 41, 64, "fp4"), ONE),
}


@pytest.fixture
def device() -> Iterator[Device]:
    with stand_in.device(SPEC) as found:
        yield found


def drawn(shape: _Shape, dtype: torch.dtype) -> Inputs:
    return shape.make(dtype, 1)


def assert_exact(out: Tensor, inputs: Inputs) -> None:
    """Rounded once, of sums that are as exact as float32's.

    Beside bfloat16, the code of the weight has 16 bits; of FP4's least, as many beside float16.
    """
    x, bias, dtype = inputs["x"].double(), inputs["bias"].double(), inputs["x"].dtype
    weight = _weight(inputs)
    truth, magnitudes = x @ weight.T + bias, x.abs() @ weight.abs().T + bias.abs()
    assert (out.dtype, out.shape) == (dtype, truth.shape)
    allowed = torch.finfo(dtype).eps / 2 * truth.abs()
    is_fp4 = QUANT_TYPES[inputs["quant_type"]] == "fp4"
    of_code = 2.0**-17 if dtype == torch.bfloat16 or (is_fp4 and dtype == torch.float16) else 0
    allowed += (of_code + 4 * torch.finfo(torch.float32).eps) * magnitudes
    assert ((out.double() - truth).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_few_rows_are_rounded_once_in_any_order_of_threads(
    device: Device, name: str, dtype: torch.dtype
) -> None:
    shape, multiprocessors = SHAPES[name]
    inputs = drawn(shape, dtype)
    device.multiprocessors(multiprocessors)
    found = []
    for order in (0, 1, 7):
        device.order(order)
        found.append(device(FORWARD, *inputs.values())[0])
        assert torch.equal(found[-1], found[0])
    assert_exact(found[0], inputs)


def test_more_multiprocessors_sum_few_columns_in_parts(device: Device) -> None:
    """Which float32 shows."""
    inputs = drawn(SHAPES["parts"][0], torch.float32)
    [whole] = device(FORWARD, *inputs.values())
    device.multiprocessors(MANY)
    assert not torch.equal(device(FORWARD, *inputs.values())[0], whole)


BACK = {
    **{f"rows_{n}": (_Shape((n,), 128, 48, 64), ONE) for n in (1, 7, 8, 9, 16, 17, 33, 64)},
    "blocks_over_rows": (_Shape((4,), 320, 32, 128), ONE),
    "one_block": (_Shape((3, 2), 64, 16, 4096), ONE),
    # Sums of parts, the last one short.
    "parts": (_Shape((5,), 64, 1040, 64), MANY),
    "fp4": (_Shape((9,), 128, 48, 64, "fp4"), ONE),
    # Sixteen rows of the weight are a group.
    "other_outputs": (_Shape((5,), 64, 40, 64), ONE),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BACK)
def test_gradients_of_few_rows_are_rounded_once(
    device: Device, name: str, dtype: torch.dtype
) -> None:
    shape, multiprocessors = BACK[name]
    inputs = drawn(shape, dtype)
    dout = stand_in.cotangents_of(SPEC, FORWARD, inputs, 2)["dout"]
    known = {**inputs, "dout": dout}
    given = [known[name] for name in BACKWARD.inputs]
    device.multiprocessors(multiprocessors)
    found = []
    for order in (0, 1, 7):
        device.order(order)
        found.append(device(BACKWARD, *given))
        assert all(map(torch.equal, found[-1], found[0]))
    dx, dbias = found[0]
    weight = _weight(inputs)
    truth, magnitudes = dout.double() @ weight, dout.double().abs() @ weight.abs()
    allowed = torch.finfo(dtype).eps / 2 * truth.abs()
    # Beside numbers of 16 bits, the code and what scales multiply have as many.
    of_parts = 2.0**-16 if dtype.itemsize == 2 else 4 * torch.finfo(torch.float32).eps
    if name == "other_outputs":  # by tiles of the weight, which are rounded
        of_parts = torch.finfo(dtype).eps
    assert ((dx.double() - truth).abs() <= allowed + of_parts * magnitudes).all()
    expected = dout.double().flatten(0, -2).sum(0)
    torch.testing.assert_close(dbias.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-6)


def _weight(inputs: Inputs) -> Tensor:
    size = (len(inputs["bias"]), inputs["in_features"])
    quant_type = QUANT_TYPES[inputs["quant_type"]]
    absmax = inputs["absmax"].double()
    return dequantize_4bit(inputs["packed"], absmax, size, inputs["block_size"], quant_type)


def _column_strided(inputs: Inputs) -> Inputs:
    return {**inputs, "x": inputs["x"].mT.contiguous().mT}


def _askew(inputs: Inputs) -> Inputs:
    x = inputs["x"]
    buffer = torch.zeros((len(x), x.shape[1] + 3), dtype=x.dtype)
    return {**inputs, "x": buffer[:, 3:].copy_(x)}


def _packed_askew(inputs: Inputs) -> Inputs:
    packed = inputs["packed"]
    return {**inputs, "packed": torch.zeros(len(packed) + 1, dtype=torch.uint8)[1:].copy_(packed)}


@pytest.mark.parametrize("edit", [_column_strided, _askew, _packed_askew])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_what_cannot_be_read_in_16_bytes_is_as_exact(
    device: Device, edit: Callable[[Inputs], Inputs], dtype: torch.dtype
) -> None:
    inputs = edit(drawn(_Shape((9,), 128, 20, 64), dtype))
    assert_exact(device(FORWARD, *inputs.values())[0], inputs)


@pytest.mark.parametrize("quant_type", QUANT_TYPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_that_are_none_stay_in_their_rows(
    device: Device, dtype: torch.dtype, quant_type: str
) -> None:
    """Tensor cores have the code in parts: of infinity times one, no part may make a NaN."""
    inputs = drawn(_Shape((12,), 128, 32, 64, quant_type), dtype)
    for row, number in ((1, torch.inf), (3, -torch.inf), (9, torch.nan)):
        inputs["x"][row, 5 * row] = number
    out = device(FORWARD, *inputs.values())[0]
    expected = stand_in.by_reference(FORWARD, *inputs.values())[0]
    assert expected[1].isinf().any()
    for row in (1, 3, 9):
        assert torch.equal(out[row].nan_to_num(0, 1, -1), expected[row].nan_to_num(0, 1, -1))
    others = [row for row in range(12) if row not in (1, 3, 9)]
    assert_exact(out[others], {**inputs, "x": inputs["x"][others]})


@pytest.mark.parametrize("quant_type", QUANT_TYPES)
def test_a_value_of_the_code_is_its_parts(device: Device, quant_type: str) -> None:
    """One column of x at a time brings up single weights."""
    inputs = drawn(_Shape((64,), 64, 16, 64, quant_type), torch.float32)
    inputs["x"], inputs["bias"] = torch.eye(64), torch.zeros(16)
    out = device(FORWARD, *inputs.values())[0]
    torch.testing.assert_close(out.T.double(), _weight(inputs), rtol=2.0**-22, atol=0)
