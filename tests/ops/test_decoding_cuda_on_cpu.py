"""The CUDA kernels of decoding steps, of the scan's state and of the convolution's, run on the CPU.

`cuda_on_cpu/` stands in for the GPU; what is its own is not seen here.
"""

import math
from collections.abc import Iterator

import pytest
import torch

from fuseport.ops import OPS
from fuseport.ops.causal_conv1d_update.cases import CASES as CONV_CASES
from fuseport.ops.selective_state_update.cases import _HEAD, CASES, _Shape
from fuseport.ops.spec import Case, OpSpec
from fuseport.tests.ops.cuda_on_cpu import stand_in
from fuseport.tests.ops.cuda_on_cpu.stand_in import DTYPES, Device, check

STATE, CONV = OPS["selective_state_update"], OPS["causal_conv1d_update"]
SPECS = {operator.name: spec for spec in (STATE, CONV) for operator in spec.operators}
# Without the largest: what they have, others have in less, and a GPU of one thread is slow.
QUICK = [case for case in (*CASES, *CONV_CASES) if case.name not in ("many_units", "mamba_2")]


@pytest.fixture
def devices() -> Iterator[dict[str, Device]]:
    with stand_in.device(STATE) as state, stand_in.device(CONV) as conv:
        yield {name: state if spec is STATE else conv for name, spec in SPECS.items()}


def case_of(name: str, **shape: object) -> Case:
    made = _Shape(gated=True, **shape)  # type: ignore[arg-type]
    return Case(name, "selective_state_update_gated", made.make)


# States in whole packs: of a thread, of a part of a warp, of a warp and more.
PACKS = (
    case_of("states_8", N=8, d=9),
    case_of("states_24", N=24, d=5),
    case_of("states_128", b=1, h=2, N=128, d=18),
    case_of("states_600", b=1, h=1, N=600, d=3),
    case_of("one_A", N=16, d=7, layouts=_HEAD),
    case_of("state_in_half", N=32, d=10, wide_state=False),
    case_of("groups", h=4, g=2, N=16, d=3),
    case_of("many_blocks", h=1, d=130, N=16),
)


@pytest.mark.in_turn(QUICK, DTYPES, ("plain", "gated", "layout_sliced"))
def test_kernels_are_as_good_as_the_reference(
    devices: dict[str, Device], case: Case, dtype: torch.dtype
) -> None:
    check(devices[case.operator], case, dtype)


@pytest.mark.in_turn(PACKS, DTYPES, tuple(case.name for case in PACKS))
def test_states_in_packs(devices: dict[str, Device], case: Case, dtype: torch.dtype) -> None:
    check(devices[case.operator], case, dtype)


@pytest.mark.parametrize("case", [PACKS[1], PACKS[3], CONV_CASES[4]], ids=lambda case: case.name)
def test_bits_do_not_depend_on_the_order_of_threads(devices: dict[str, Device], case: Case) -> None:
    device, operator = devices[case.operator], SPECS[case.operator].operator(case.operator)
    inputs = case.make(torch.float32, 5)
    runs = []
    for order in (0, 1, 2, 3):
        device.order(order)
        runs.append(device(operator, *inputs.values()))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["state", "x", "dt", "A", "B", "C", "D", "z", "dt_bias"])
def test_nan_and_inf_spread_as_in_the_reference(
    devices: dict[str, Device], name: str, value: float
) -> None:
    operator = STATE.operator("selective_state_update_gated")
    inputs = PACKS[0].make(torch.float32, 10)
    inputs[name].view(-1)[3] = value
    got = devices[operator.name](operator, *inputs.values())
    for y, z in zip(got, operator.reference(*inputs.values()), strict=True):
        assert torch.equal(y.isnan(), z.isnan())
        assert torch.equal(y.isposinf(), z.isposinf())
        assert torch.equal(y.isneginf(), z.isneginf())


@pytest.mark.parametrize(("spec", "name"), [(STATE, "A"), (CONV, "bias")])
def test_inputs_are_checked_as_on_the_cpu(
    devices: dict[str, Device], spec: OpSpec, name: str
) -> None:
    operator = spec.operators[0]
    inputs = spec.cases[0].make(torch.float32, 1)
    inputs[name] = inputs[name][:-1]
    with pytest.raises(ValueError, match=rf"fuseport::{operator.name}: {name} must be") as caught:
        devices[operator.name](operator, *inputs.values())
    with pytest.raises(ValueError, match=f"{name} must be") as expected:
        operator.reference(*inputs.values())
    assert str(caught.value).splitlines()[0] == str(expected.value)


@pytest.mark.parametrize("spec", [STATE, CONV], ids=lambda spec: spec.name)
def test_the_operators_are_all_there(spec: OpSpec) -> None:
    binding = (spec.folder / "cuda.cpp").read_text()
    assert all(f'm.impl("{operator.name}"' in binding for operator in spec.operators)
