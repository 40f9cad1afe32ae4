"""A decoding step of the causal convolution: values, the state in place, fakes, errors."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fuseport.ops import OPS, register
from fuseport.ops.causal_conv1d import causal_conv1d
from fuseport.ops.causal_conv1d_update import causal_conv1d_update
from fuseport.ops.causal_conv1d_update.cases import CASES
from fuseport.ops.spec import FLOATING, Case, Inputs, OpSpec

CASE = {case.name: case for case in CASES}
IN_ALL_DTYPES = ("plain", "circular")
on_each = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


@pytest.fixture(scope="module")
def spec() -> OpSpec:
    assert register("causal_conv1d_update") == {"causal_conv1d_update": "native"}
    return OPS["causal_conv1d_update"]


@pytest.mark.in_turn(CASES, FLOATING, IN_ALL_DTYPES)
def test_kernel_is_as_good_as_the_reference(spec: OpSpec, case: Case, dtype: torch.dtype) -> None:
    operator, inputs = spec.operator(case.operator), case.make(dtype, 1)
    exact = {
        k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v
        for k, v in inputs.items()
    }
    out, new_state = operator(*inputs.values())
    plain, plain_state = operator.reference(*inputs.values())
    truth, _ = operator.reference(*exact.values())
    assert torch.equal(new_state, plain_state)
    assert out.dtype == plain.dtype == dtype
    assert out.shape == truth.shape
    if out.numel():
        error = (out.double() - truth).abs().max()
        allowed = 3 * (plain.double() - truth).abs().max()
        allowed += 4 * torch.finfo(dtype).eps * truth.abs().max()
        assert error <= allowed


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("slots", [3, 4, 7])
@pytest.mark.parametrize("split", [[1] * 12, [3, 1, 8], [12]])
@pytest.mark.parametrize("circular", [False, True])
def test_steps_give_what_the_whole_sequence_gives(
    spec: OpSpec, silu: bool, slots: int, split: list[int], circular: bool
) -> None:
    x, weight = torch.randn(2, 5, 12, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    bias = torch.randn(5, dtype=torch.float64)
    activation = "silu" if silu else None
    whole = causal_conv1d(x, weight, bias, activation=activation)
    state, seqlens = torch.zeros(2, 5, slots, dtype=torch.float64), torch.zeros(2).int()
    parts = []
    for part in x.split(split, 2):
        step = part.squeeze(2) if part.shape[2] == 1 else part
        out = causal_conv1d_update(
            step, state, weight, bias, activation, seqlens if circular else None
        )
        assert out.shape == step.shape
        parts.append(out.reshape(part.shape))
        seqlens += part.shape[2]
    torch.testing.assert_close(torch.cat(parts, 2), whole)
    if circular:
        for n in range(12 - slots, 12):
            assert torch.equal(state[:, :, n % slots], x[:, :, n])
    else:
        assert torch.equal(state, x[:, :, 12 - slots :])


def test_as_transformers_decodes_with_a_state_as_wide_as_the_filter(spec: OpSpec) -> None:
    """Its slow path rolls the state, puts the input last, and sums products over the state."""
    torch.manual_seed(0)
    state, weight = torch.randn(2, 5, 4), torch.randn(5, 4)
    bias, x = torch.randn(5), torch.randn(2, 5)
    rolled = state.roll(-1, -1)
    rolled[:, :, -1] = x
    expected = torch.nn.functional.silu((rolled * weight).sum(-1) + bias)
    out = causal_conv1d_update(x, state, weight, bias, "silu")
    torch.testing.assert_close(out, expected)
    assert torch.equal(state, rolled)


@on_each
def test_fake_has_the_strides_of_the_kernel_and_of_the_reference(spec: OpSpec, case: Case) -> None:
    operator, inputs = spec.operator(case.operator), case.make(torch.float32, 0)
    with FakeTensorMode() as mode:
        fakes = operator(
            *(mode.from_tensor(v) if isinstance(v, Tensor) else v for v in inputs.values())
        )
    for fake, real, plain in zip(
        fakes, operator(*inputs.values()), operator.reference(*inputs.values()), strict=True
    ):
        assert fake.shape == real.shape == plain.shape
        assert fake.stride() == real.stride() == plain.stride()
        assert fake.dtype == real.dtype == plain.dtype


@pytest.mark.parametrize("name", ["plain", "circular", "layout_circular"])
def test_opcheck(spec: OpSpec, name: str) -> None:
    inputs = tuple(CASE[name].make(torch.float32, 0).values())
    torch.library.opcheck(getattr(torch.ops.fuseport, CASE[name].operator).default, inputs)


def test_native_schemas_are_those_of_the_spec(spec: OpSpec) -> None:
    for operator in spec.operators:
        overload = getattr(torch.ops.fuseport, operator.name).default
        assert str(overload._schema) == operator.qualified_name + operator.schema


def test_many_units_do_not_depend_on_threads(spec: OpSpec) -> None:
    inputs = CASE["many_units"].make(torch.float32, 0)
    operator, before = spec.operator("causal_conv1d_update"), torch.get_num_threads()
    try:
        runs = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            runs.append(operator(*inputs.values()))
    finally:
        torch.set_num_threads(before)
    for out, new_state in runs[1:]:
        assert torch.equal(out, runs[0][0])
        assert torch.equal(new_state, runs[0][1])


def test_it_refuses_to_be_differentiated(spec: OpSpec) -> None:
    x, state = torch.randn(1, 2, requires_grad=True), torch.zeros(1, 2, 3)
    out = causal_conv1d_update(x, state, torch.randn(2, 4))
    with pytest.raises(RuntimeError, match="derivative for fuseport::causal_conv1d_update"):
        out.sum().backward()


BAD: dict[str, Callable[[Inputs], dict[str, Tensor]]] = {
    "x is 2-D": lambda x: {"x": x["x"][0]},
    "x is of integers": lambda x: {"x": x["x"].int()},
    "weight is 1-D": lambda x: {"weight": x["weight"][0]},
    "weight has no width": lambda x: {"weight": x["weight"][:, :0]},
    "weight is half": lambda x: {"weight": x["weight"].half()},
    "bias is shorter": lambda x: {"bias": x["bias"][1:]},
    "conv_state is 2-D": lambda x: {"conv_state": x["conv_state"][0]},
    "conv_state has other channels": lambda x: {"conv_state": x["conv_state"][:, 1:]},
    "conv_state is too short": lambda x: {"conv_state": x["conv_state"][..., 1:]},
    "conv_state is float64": lambda x: {"conv_state": x["conv_state"].double()},
    "cache_seqlens is int64": lambda x: {"cache_seqlens": x["cache_seqlens"].long()},
    "cache_seqlens is longer": lambda x: {"cache_seqlens": x["cache_seqlens"].repeat(2)},
}


def message(run: Callable[..., object], inputs: Inputs) -> str:
    with pytest.raises(ValueError, match=r"fuseport::\w+: \w+ must be .*; got ") as caught:
        run(*inputs.values())
    return str(caught.value)


@pytest.mark.parametrize("what", BAD)
def test_bad_inputs_are_refused_alike_by_kernel_reference_and_fake(spec: OpSpec, what: str) -> None:
    for name in ("circular",) if "seqlens" in what else ("plain", "circular"):
        good = CASE[name].make(torch.float32, 0)
        inputs = good | BAD[what](good)
        operator = spec.operator(CASE[name].operator)
        expected = message(operator.reference, inputs)
        assert message(operator, inputs) == expected
        with FakeTensorMode() as mode:
            fakes = {
                k: mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in inputs.items()
            }
            assert message(operator, fakes) == expected


@pytest.mark.parametrize("name", ["plain", "slots_9", "circular_slots_8"])
def test_it_becomes_standard_operators_of_onnx(spec: OpSpec, name: str, tmp_path: Path) -> None:
    case = CASE[name]
    overload = getattr(torch.ops.fuseport, case.operator).default
    *tensors, silu = case.make(torch.float32, 0).values()

    class Step(torch.nn.Module):
        def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
            return overload(*given, silu)

    table = spec.lowering().decompositions()
    program = torch.export.export(Step(), tuple(tensors))
    program = program.run_decompositions({overload: table[case.operator]})
    path = tmp_path / "step.onnx"
    torch.onnx.export(program, (), path, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    feed = {i.name: t.numpy() for i, t in zip(session.get_inputs(), tensors, strict=True)}
    for got, expected in zip(session.run(None, feed), overload(*tensors, silu), strict=True):
        torch.testing.assert_close(torch.from_numpy(got), expected)


LESSER_ISA = """
import math, torch
from fuseport.ops import OPS, register
register("causal_conv1d_update")
spec = OPS["causal_conv1d_update"]
for case in spec.cases:
    for dtype in (torch.float32, torch.float64):
        inputs = case.make(dtype, 0)
        operator = spec.operator(case.operator)
        for got, wanted in zip(operator(*inputs.values()), operator.reference(*inputs.values())):
            torch.testing.assert_close(got, wanted)
"""


@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_lesser_instruction_sets_compute_the_same(
    spec: OpSpec, isa: str, run_python: Callable[..., Any]
) -> None:
    done = run_python(LESSER_ISA, FUSEPORT_ISA=isa)
    assert done.returncode == 0, done.stderr


def test_a_step_by_hand(spec: OpSpec) -> None:
    """b = d = 1, W = 2: the slot after that of the input before is written."""
    state, weight = torch.tensor([[[10.0, 20.0, 30.0]]]), torch.tensor([[2.0, 3.0]])
    x, seqlens = torch.tensor([[5.0]]), torch.tensor([4], dtype=torch.int32)
    out = causal_conv1d_update(x, state, weight, torch.tensor([1.0]), "silu", seqlens)
    total = 1 + 2 * 10.0 + 3 * 5.0
    assert float(out) == pytest.approx(total / (1 + math.exp(-total)))
    assert state.tolist() == [[[10.0, 5.0, 30.0]]]
