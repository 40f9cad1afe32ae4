"""The CUDA kernels of the causal convolution, run on the CPU: values, gradients, barriers, bounds.

`cuda_on_cpu/` stands in for the GPU; what is its own is not seen here.
"""

import math
from collections.abc import Iterator

import pytest
import torch

from fuseport.ops import OPS
from fuseport.ops.causal_conv1d.cases import _LAST, _PACKED, CASES, _Shape
from fuseport.ops.spec import Case
from fuseport.tests.ops.cuda_on_cpu import stand_in
from fuseport.tests.ops.cuda_on_cpu.stand_in import DTYPES, Device, check

SPEC = OPS["causal_conv1d"]
CASE = {case.name: case for case in CASES}
# Without the largest: what they have, others have in less, and a GPU of one thread is slow.
QUICK = [case for case in CASES if not case.name.endswith("many_units")]


@pytest.fixture
def device() -> Iterator[Device]:
    with stand_in.device(SPEC) as found:
        yield found


def case_of(name: str, **shape: object) -> Case:
    made = _Shape(**shape)  # type: ignore[arg-type]
    return Case(name, f"causal_conv1d{'_packed' * bool(made.packed)}", made.make)


# Shapes whose packs are whole, as those of the cases mostly are not, and rows that begin anywhere.
ALIGNED = (
    case_of("time", b=2, d=3, l=96),
    case_of("time_width_2", b=2, d=5, l=64, W=2, silu=False),
    case_of("time_width_1", b=2, d=2, l=64, W=1),
    case_of("time_odd", b=2, d=5, l=67, W=3),
    case_of("time_short", b=3, d=4, l=2),
    case_of("time_chunks", b=1, d=1, l=2 * 8 * 32 * 8 + 5),
    case_of("time_chunks_of_many_packs", b=1, d=32, l=2101),
    case_of("channels", b=2, d=40, l=70, layouts=_LAST),
    case_of("channels_width_1", b=2, d=8, l=33, W=1, layouts=_LAST),
    case_of("channels_width_2", b=1, d=8, l=33, W=2, silu=False, layouts=_LAST),
    case_of("channels_short", b=2, d=8, l=2, layouts=_LAST),
    case_of("channels_lanes", b=2, d=136, l=20, W=3, layouts=_LAST),
    case_of("channels_packed", b=2, d=16, l=71, packed=_PACKED, layouts=_LAST),
    case_of("channels_packed_width_2", b=2, d=8, l=40, W=2, packed=_PACKED, layouts=_LAST),
    case_of("channels_wide_weight", b=2, d=8, l=19, wide_weight=True, layouts=_LAST),
)


@pytest.mark.in_turn(QUICK, DTYPES, ("plain", "last_plain", "packed_last"))
def test_kernels_are_as_good_as_the_reference(
    device: Device, case: Case, dtype: torch.dtype
) -> None:
    check(device, case, dtype)


@pytest.mark.in_turn(ALIGNED, DTYPES, tuple(case.name for case in ALIGNED))
def test_kernels_that_move_packs(device: Device, case: Case, dtype: torch.dtype) -> None:
    check(device, case, dtype)


@pytest.mark.parametrize("count", [1, 2, 100])
def test_plans_of_other_devices(device: Device, count: int) -> None:
    device.multiprocessors(count)
    check(device, case_of("channels", b=3, d=16, l=90, layouts=_LAST), torch.float32)


@pytest.mark.parametrize(
    "name",
    ["time_odd", "time_chunks_of_many_packs", "channels_lanes", "channels_packed", "width_7"],
)
def test_bits_do_not_depend_on_the_order_of_threads(device: Device, name: str) -> None:
    case = {**CASE, **{case.name: case for case in ALIGNED}}[name]
    operator = SPEC.operator(case.operator)
    inputs = case.make(torch.float32, 5)
    cotangents = stand_in.cotangents_of(SPEC, operator, inputs, 6)
    runs = []
    for order in (0, 1, 2, 3):
        device.order(order)
        runs.append(device.forward_and_backward(operator, inputs, cotangents))
    for run in runs[1:]:
        for tensor, value in run.items():
            assert torch.equal(value, runs[0][tensor]), tensor


def test_a_cotangent_may_lie_otherwise_than_its_output(device: Device) -> None:
    for case in ALIGNED[0], ALIGNED[6]:
        operator = SPEC.operator(case.operator)
        inputs = case.make(torch.float32, 3)
        cotangents = stand_in.cotangents_of(SPEC, operator, inputs, 4)
        other = {k: v.mT.contiguous().mT for k, v in cotangents.items()}
        flat = {k: v.contiguous() for k, v in cotangents.items()}
        for given in other, flat:
            got = device.forward_and_backward(operator, inputs, given)
            expected = stand_in.forward_and_backward(
                SPEC, stand_in.by_reference, operator, inputs, given
            )
            for name, value in got.items():
                torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [3, 13, 67])
def test_steps_that_are_none_make_no_nan_of_the_last_input(device: Device, length: int) -> None:
    """The last pack of a row has more steps than the row."""
    case = case_of("last", b=1, d=2, l=length, silu=False)
    operator, inputs = SPEC.operator(case.operator), case.make(torch.float32, 8)
    inputs["x"][0, 1, -1] = math.inf
    given = stand_in.cotangents_of(SPEC, operator, inputs, 9)
    gradient = SPEC.operator(operator.backward or "")
    passed = SPEC.backward_inputs(operator, inputs, given).values()
    for got, expected in zip(device(gradient, *passed), gradient.reference(*passed), strict=True):
        assert torch.equal(got.isnan(), expected.isnan())
        assert torch.equal(got.isinf(), expected.isinf())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["time_odd", "channels_lanes", "channels_packed", "width_7"])
def test_nan_and_inf_spread_as_in_the_reference(device: Device, name: str, value: float) -> None:
    case = {**CASE, **{case.name: case for case in ALIGNED}}[name]
    operator = SPEC.operator(case.operator)
    inputs = case.make(torch.float32, 10)
    inputs["x"][0, 1, inputs["x"].shape[2] // 2] = value
    got = device(operator, *inputs.values())
    for index, (y, z) in enumerate(zip(got, operator.reference(*inputs.values()), strict=True)):
        assert torch.equal(y.isnan(), z.isnan()), index
        assert torch.equal(y.isposinf(), z.isposinf()), index
        assert torch.equal(y.isneginf(), z.isneginf()), index


def test_inputs_are_checked_as_on_the_cpu(device: Device) -> None:
    inputs = CASE["plain"].make(torch.float32, 1)
    inputs["bias"] = inputs["bias"][:-1]
    operator = SPEC.operator("causal_conv1d")
    with pytest.raises(ValueError, match=r"fuseport::causal_conv1d: bias must be") as caught:
        device(operator, *inputs.values())
    with pytest.raises(ValueError, match="bias must be") as expected:
        operator.reference(*inputs.values())
    assert str(caught.value).splitlines()[0] == str(expected.value)


def test_the_operators_are_all_there() -> None:
    binding = (SPEC.folder / "cuda.cpp").read_text()
    assert all(f'm.impl("{operator.name}"' in binding for operator in SPEC.operators)
