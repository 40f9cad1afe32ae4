"""The CUDA kernels of the selective scan, run on the CPU: values, gradients, barriers, bounds.

`cuda_on_cpu/` stands in for the GPU; what is its own is not seen here.
"""

import math
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from fuseport.ops import OPS
from fuseport.ops.selective_scan.cases import CASES, _Shape
from fuseport.ops.selective_scan.shapes import CHUNK
from fuseport.ops.spec import Case
from fuseport.tests.ops.cuda_on_cpu import stand_in
from fuseport.tests.ops.cuda_on_cpu.stand_in import DTYPES, Device, check

SPEC = OPS["selective_scan"]
CASE = {case.name: case for case in CASES}
# Without the largest: what they have, others have in less, and a GPU of one thread is slow.
QUICK = [case for case in CASES if not case.name.endswith(("many_units", "channels_130"))]


@pytest.fixture
def device() -> Iterator[Device]:
    with stand_in.device(SPEC) as found:
        yield found


def case_of(name: str, **shape: object) -> Case:
    made = _Shape(**shape)  # type: ignore[arg-type]
    return Case(name, f"selective_scan{'_gated' * made.gated}", made.make)


@pytest.mark.in_turn(QUICK, DTYPES, ("gated", "complex_gated", "chunk_plus_1"))
def test_kernels_are_as_good_as_the_reference(
    device: Device, case: Case, dtype: torch.dtype
) -> None:
    check(device, case, dtype)


SEGMENTED = (
    case_of("real", b=1, d=5, l=9 * CHUNK + 5, N=16, gated=True),
    case_of("odd", b=2, d=3, l=7 * CHUNK + 1, N=3, B_groups=3),
    case_of("one_state", b=1, d=4, l=8 * CHUNK, N=1, gated=True),
    case_of("20_states", b=1, d=2, l=5 * CHUNK - 1, N=20, C_groups=None, gated=True),
    case_of("complex", b=1, d=3, l=6 * CHUNK + 63, N=5, complex=True, B_groups=None),
)


@pytest.mark.in_turn(SEGMENTED, DTYPES, ("real",))
def test_time_in_segments(device: Device, case: Case, dtype: torch.dtype) -> None:
    device.multiprocessors(0)  # none that a segment would keep busy
    whole = check(device, case, dtype)
    device.multiprocessors(100)
    cut = check(device, case, dtype)
    if dtype != torch.float16:  # that the plan did cut it shows in what is summed otherwise
        assert any(not torch.equal(cut[name], whole[name]) for name in cut)


@pytest.mark.parametrize("name", ["channels_37", "states_19", "complex_channels_37", "2d_C"])
def test_bits_do_not_depend_on_the_order_of_threads(device: Device, name: str) -> None:
    operator = SPEC.operator(CASE[name].operator)
    inputs = CASE[name].make(torch.float32, 5)
    cotangents = stand_in.cotangents_of(SPEC, operator, inputs, 6)
    device.multiprocessors(100)
    runs = []
    for order in (0, 1, 2, 3):
        device.order(order)
        runs.append(device.forward_and_backward(operator, inputs, cotangents))
    for run in runs[1:]:
        for tensor, value in run.items():
            assert torch.equal(value, runs[0][tensor]), tensor


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["u", "delta", "A", "B", "C", "D", "z", "delta_bias"])
def test_nan_and_inf_spread_as_in_the_reference(device: Device, name: str, value: float) -> None:
    operator = SPEC.operator("selective_scan_gated")
    inputs = CASE["channels_37"].make(torch.float32, 10)
    first_row = inputs[name][(0,) * (inputs[name].dim() - 1)]
    first_row[len(first_row) // 2] = value
    cotangents = stand_in.cotangents_of(SPEC, operator, inputs, 11)
    assert operator.backward is not None
    gradient = SPEC.operator(operator.backward)
    backward_inputs = SPEC.backward_inputs(operator, inputs, cotangents).values()
    got = (*device(operator, *inputs.values()), *device(gradient, *backward_inputs))
    expected = (*operator.reference(*inputs.values()), *gradient.reference(*backward_inputs))
    for index, (y, z) in enumerate(zip(got, expected, strict=True)):
        assert torch.equal(y.isnan(), z.isnan()), index
        assert torch.equal(y.isposinf(), z.isposinf()), index
        assert torch.equal(y.isneginf(), z.isneginf()), index


@pytest.mark.parametrize("states", [2, 3, 17])
def test_threads_without_a_state_make_no_nan_of_an_infinite_input(
    device: Device, states: int
) -> None:
    case = case_of("few", b=1, d=3, l=11, N=states)
    operator, inputs = SPEC.operator(case.operator), case.make(torch.float32, 13)
    inputs["u"][0, 1, 4] = math.inf
    for name in ("B", "C"):
        inputs[name].abs_()  # the sum over states is infinite, too
    inputs["D"].zero_().add_(1)
    got, expected = (
        run(*inputs.values())[0] for run in (partial(device, operator), operator.reference)
    )
    assert expected[0, 1, 4:].isposinf().all()
    assert torch.equal(got.isposinf(), expected.isposinf())
    assert torch.equal(got.isnan(), expected.isnan())


def test_halves_are_read_and_rounded_as_torch_does(device: Device) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        u = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).reshape(1, 256, 256)
        zeros, A = torch.zeros(1, 1, 256, dtype=dtype), torch.zeros(256, 1)
        D = torch.rand(256, generator=torch.Generator().manual_seed(12)) * 3
        operator = SPEC.operator("selective_scan")
        inputs = (u, torch.zeros_like(u), A, zeros, zeros, D, torch.zeros(256), False)
        out = device(operator, *inputs)[0]
        rows = u.isfinite().all(-1)
        assert torch.equal(out[rows], (u.float() * D[:, None]).to(dtype)[rows])


def test_inputs_are_checked_as_on_the_cpu(device: Device) -> None:
    inputs = CASE["plain"].make(torch.float32, 1)
    inputs["B"] = inputs["B"][..., :-1]
    operator = SPEC.operator("selective_scan")
    with pytest.raises(ValueError, match=r"fuseport::selective_scan: B must be") as caught:
        device(operator, *inputs.values())
    with pytest.raises(ValueError, match="B must be") as expected:
        operator.reference(*inputs.values())
    assert str(caught.value).splitlines()[0] == str(expected.value)


def test_the_operators_are_all_there() -> None:
    binding = (SPEC.folder / "cuda.cpp").read_text()
    assert all(f'm.impl("{operator.name}"' in binding for operator in SPEC.operators)
