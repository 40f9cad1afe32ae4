"""The CUDA kernels of norms, with a gate and without, run on the CPU: values, gradients, barriers.

`cuda_on_cpu/` stands in for the GPU; what is its own is not seen here.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from fuseport.ops import OPS
from fuseport.ops.rms_norm.cases import CASES, NormShape
from fuseport.ops.rms_norm_gated.cases import CASES as GATED_CASES
from fuseport.ops.spec import Case, OpSpec
from fuseport.tests.ops.cuda_on_cpu import stand_in
from fuseport.tests.ops.cuda_on_cpu.stand_in import DTYPES, Device, check

SPECS = {name: OPS[name] for name in ("rms_norm", "rms_norm_gated")}
ORDERS = {"rms_norm": None, "norm_first": True, "gate_first": False}


def spec_of(case: Case) -> OpSpec:
    return SPECS[case.operator]


@pytest.fixture
def devices() -> Iterator[dict[str, Device]]:
    with (
        stand_in.device(SPECS["rms_norm"]) as plain,
        stand_in.device(SPECS["rms_norm_gated"]) as gated,
    ):
        yield {"rms_norm": plain, "rms_norm_gated": gated}


def case_of(name: str, shape: NormShape) -> Case:
    operator = "rms_norm" if shape.norm_before_gate is None else "rms_norm_gated"
    return Case(name, operator, shape.make)


def in_orders(shapes: dict[str, NormShape]) -> tuple[Case, ...]:
    return tuple(
        case_of(f"{name}_{order}", replace(shape, norm_before_gate=before))
        for order, before in ORDERS.items()
        for name, shape in shapes.items()
    )


# Groups that threads of a part of a warp, of a warp, of a block and of a larger block hold, some of
# them not to the last.
HELD = in_orders(
    {
        "lanes_8": NormShape((13, 104)),
        "lanes_8_groups": NormShape((7, 64), group_size=16),
        "lanes_32": NormShape((9, 328), wide_weight=False),
        "lanes_128": NormShape((3, 2064)),
        "lanes_512": NormShape((2, 4104)),
    }
)
LONGER = in_orders({"longer": NormShape((2, 8200))})


# Without the largest: what they have, others have in less, and a GPU of one thread is slow.
QUICK = [case for case in (*CASES, *GATED_CASES) if "many_units" not in case.name]


@pytest.mark.in_turn(QUICK, DTYPES, ("plain", "groups_of_37"))
def test_kernels_are_as_good_as_the_reference(
    devices: dict[str, Device], case: Case, dtype: torch.dtype
) -> None:
    check(devices[case.operator], case, stand_in.compared_in(case, dtype))


@pytest.mark.in_turn(HELD, DTYPES, tuple(c.name for c in HELD if c.name.startswith("lanes_8")))
def test_groups_that_threads_hold(
    devices: dict[str, Device], case: Case, dtype: torch.dtype
) -> None:
    check(devices[case.operator], case, dtype)


@pytest.mark.parametrize("case", LONGER, ids=lambda case: case.name)
def test_groups_that_no_threads_hold(devices: dict[str, Device], case: Case) -> None:
    check(devices[case.operator], case, torch.float32)


@pytest.mark.parametrize("count", [2, 100])
def test_plans_of_other_devices(devices: dict[str, Device], count: int) -> None:
    case = case_of("rows", NormShape((300, 32), group_size=16))
    devices[case.operator].multiprocessors(count)
    check(devices[case.operator], case, torch.float32)


@pytest.mark.parametrize("case", [HELD[0], HELD[2], HELD[3], HELD[8]], ids=lambda case: case.name)
def test_bits_do_not_depend_on_the_order_of_threads(devices: dict[str, Device], case: Case) -> None:
    spec, device = spec_of(case), devices[case.operator]
    operator = spec.operator(case.operator)
    inputs = case.make(torch.float32, 5)
    cotangents = stand_in.cotangents_of(spec, operator, inputs, 6)
    runs = []
    for order in (0, 1, 2, 3):
        device.order(order)
        runs.append(device.forward_and_backward(operator, inputs, cotangents))
    for run in runs[1:]:
        for tensor, value in run.items():
            assert torch.equal(value, runs[0][tensor]), tensor


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("order", ORDERS)
def test_nan_and_inf_spread_as_in_the_reference(
    devices: dict[str, Device], order: str, value: float
) -> None:
    case = case_of(order, NormShape((5, 24), group_size=8, norm_before_gate=ORDERS[order]))
    operator = spec_of(case).operator(case.operator)
    for name in ("x", "z"):
        inputs = case.make(torch.float32, 10)
        if name in inputs:
            inputs[name][1, 3] = value
            got = devices[case.operator](operator, *inputs.values())
            expected = operator.reference(*inputs.values())
            for y, z in zip(got, expected, strict=True):
                assert torch.equal(y.isnan(), z.isnan())
                assert torch.equal(y.isposinf(), z.isposinf())
                assert torch.equal(y.isneginf(), z.isneginf())


@pytest.mark.parametrize("name", SPECS)
def test_inputs_are_checked_as_on_the_cpu(devices: dict[str, Device], name: str) -> None:
    spec = SPECS[name]
    inputs = spec.cases[0].make(torch.float32, 1)
    inputs["group_size"] = 5
    operator = spec.operator(name)
    with pytest.raises(ValueError, match=rf"fuseport::{name}: group_size must be") as caught:
        devices[name](operator, *inputs.values())
    with pytest.raises(ValueError, match="group_size must be") as expected:
        operator.reference(*inputs.values())
    assert str(caught.value).splitlines()[0] == str(expected.value)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_the_operators_are_all_there(spec: OpSpec) -> None:
    binding = (spec.folder / "cuda.cpp").read_text()
    assert all(f'm.impl("{operator.name}"' in binding for operator in spec.operators)
