"""The causal convolution: values and gradients, all cases and dtypes; fakes, errors, export."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fuseport.ops import OPS, register
from fuseport.ops.case_layouts import sliced, transposed
from fuseport.ops.causal_conv1d import causal_conv1d
from fuseport.ops.causal_conv1d.cases import CASES
from fuseport.ops.spec import FLOATING, Case, Inputs, Operator, OpSpec

CASE = {case.name: case for case in CASES}
IN_ALL_DTYPES = (
    "plain",
    "last_plain",
    "packed",
    "wide_weight",
    "last_wide_weight",
    "packed_wide_weight",
)
Run = Callable[..., Any]


@pytest.fixture(scope="module")
def spec() -> OpSpec:
    assert register("causal_conv1d") == {"causal_conv1d": "native"}
    return OPS["causal_conv1d"]


def on_each(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [CASE[n] for n in names or CASE], ids=lambda c: c.name)


def overload(name: str) -> "torch._ops.OpOverload":
    return getattr(torch.ops.fuseport, name).default


def floating(inputs: Inputs) -> dict[str, Tensor]:
    return {k: v for k, v in inputs.items() if isinstance(v, Tensor) and v.is_floating_point()}


def widened(inputs: Inputs) -> Inputs:
    return inputs | {name: value.double() for name, value in floating(inputs).items()}


def cotangents_of(operator: Operator, inputs: Inputs, seed: int) -> dict[str, Tensor]:
    """Random, in the shapes and dtypes of the outputs."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "d" + name: torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype)
        for name, y in zip(operator.outputs, operator.fake(*inputs.values()), strict=True)
    }


def backward_inputs(spec: OpSpec, case: Case, dtype: torch.dtype) -> tuple[Operator, Inputs]:
    """The backward operator of a case, and inputs for it; none requires grad."""
    operator = spec.operator(case.operator)
    inputs = case.make(dtype, 1)
    assert operator.backward is not None
    cotangents = cotangents_of(operator, inputs, 2)
    backward = spec.operator(operator.backward)
    return backward, spec.backward_inputs(operator, inputs, cotangents)


def differentiated(
    run: Callable[..., tuple[Tensor, ...]], inputs: Inputs, cotangents: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The outputs, and the gradients of all floating tensors by autograd."""
    leaves = inputs | {k: v.detach().requires_grad_() for k, v in floating(inputs).items()}
    outputs = run(*leaves.values())
    wanted = floating(leaves)
    gradients = torch.autograd.grad(
        outputs,
        tuple(wanted.values()),
        tuple(cotangents.values()),
        allow_unused=True,
        materialize_grads=True,
    )
    named = {f"d{name}": g for name, g in zip(wanted, gradients, strict=True)}
    return {"out": outputs[0].detach(), "final_states": outputs[1].detach(), **named}


@pytest.mark.in_turn(CASES, FLOATING, IN_ALL_DTYPES)
def test_kernel_is_as_good_as_the_reference(spec: OpSpec, case: Case, dtype: torch.dtype) -> None:
    operator = spec.operator(case.operator)
    inputs = case.make(dtype, 1)
    cotangents = cotangents_of(operator, inputs, 2)
    truth = differentiated(operator.reference, widened(inputs), widened(cotangents))
    baseline = differentiated(operator.reference, inputs, cotangents)
    got = differentiated(operator, inputs, cotangents)
    assert got.keys() == baseline.keys() == truth.keys()
    for name, value in got.items():
        expected = truth[name]
        assert value.shape == expected.shape, name
        assert value.dtype == baseline[name].dtype, name
        if value.numel() == 0:
            continue
        error = (value.double() - expected).abs().max()
        allowed = 3 * (baseline[name].double() - expected).abs().max()
        # In float64 the truth is the baseline itself, so that the ulps must suffice.
        ulps = 64 if dtype == torch.float64 else 4
        allowed += ulps * torch.finfo(value.dtype).eps * expected.abs().max()
        assert error <= allowed, f"{name}: off by {error:.3g}, allowed {allowed:.3g}"


@on_each()
def test_backward_of_the_reference_is_autograd_of_its_forward(spec: OpSpec, case: Case) -> None:
    operator = spec.operator(case.operator)
    inputs = case.make(torch.float64, 1)
    expected = differentiated(operator.reference, inputs, cotangents_of(operator, inputs, 2))
    gradient, saved = backward_inputs(spec, case, torch.float64)
    for name, result in zip(gradient.outputs, gradient.reference(*saved.values()), strict=True):
        torch.testing.assert_close(result, expected[name], rtol=1e-10, atol=1e-10)


@on_each("plain", "without_silu", "width_1", "width_7", "width_beyond_length", "last_chunk_plus_1")
def test_gradcheck(spec: OpSpec, case: Case) -> None:
    check_gradients(spec, case)


@on_each("packed", "packed_width_3", "packed_last", "layout_packed_sliced")
def test_gradcheck_of_packed_sequences(spec: OpSpec, case: Case) -> None:
    check_gradients(spec, case)


def check_gradients(spec: OpSpec, case: Case) -> None:
    inputs = case.make(torch.float64, 5)
    for value in floating(inputs).values():
        value.requires_grad_()
    operator = spec.operator(case.operator)
    assert torch.autograd.gradcheck(
        operator, tuple(inputs.values()), fast_mode=True, nondet_tol=0.0
    )


@pytest.mark.parametrize("silu", [False, True])
def test_packed_sequences_are_those_apart(spec: OpSpec, silu: bool) -> None:
    """And of a step by step loop over the definition, padding included."""
    inputs = CASE["packed"].make(torch.float64, 3)
    x, weight, bias, seq_idx = (inputs[n] for n in ("x", "weight", "bias", "seq_idx"))
    out = causal_conv1d(x, weight, bias, seq_idx, activation="silu" if silu else None)
    b, d, l = x.shape  # noqa: E741
    for i in range(b):
        for c in range(d):
            for t in range(l):
                total = float(bias[c])
                for k in range(4):
                    s = t - 3 + k
                    if s >= 0 and seq_idx[i, s] == seq_idx[i, t]:
                        total += float(weight[c, k] * x[i, c, s])
                value = total / (1 + math.exp(-total)) if silu else total
                value = 0.0 if seq_idx[i, t] < 0 else value
                assert abs(value - float(out[i, c, t])) < 1e-12


@pytest.mark.parametrize("length", [1, 2, 3, 50])
@pytest.mark.parametrize("bias", [False, True])
def test_as_the_slow_path_of_transformers_in_values_and_gradients(
    spec: OpSpec, length: int, bias: bool
) -> None:
    """`nn.Conv1d` over W-1 zeros in front, cut to the length, then SiLU, as its Mamba has it."""
    torch.manual_seed(0)
    conv = torch.nn.Conv1d(6, 6, 4, bias=bias, groups=6, padding=3).double()
    x = torch.randn(2, length, 6, dtype=torch.float64).transpose(1, 2).requires_grad_()
    expected = torch.nn.functional.silu(conv(x)[..., :length])
    weight = conv.weight.squeeze(1)
    out = causal_conv1d(x, weight, conv.bias, activation="silu")
    assert isinstance(out, Tensor)
    torch.testing.assert_close(out, expected)
    wanted = [x, *conv.parameters()]
    cotangent = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(out, wanted, cotangent),
        torch.autograd.grad(expected, wanted, cotangent),
    )


def test_states_carry_on_where_a_call_ended(spec: OpSpec) -> None:
    x = torch.randn(2, 5, 23, dtype=torch.float64)
    weight, bias = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    whole, last = causal_conv1d(x, weight, bias, return_final_states=True, activation="swish")
    states, parts = None, []
    for part in x.split([1, 2, 9, 11], 2):
        out, states = causal_conv1d(
            part,
            weight,
            bias,
            initial_states=states,
            return_final_states=True,
            activation="silu",
        )
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 2), whole)
    assert torch.equal(last, x[:, :, -3:])
    assert states is not None
    assert torch.equal(states, last)


@on_each("plain", "channels_37", "last_chunks_3", "packed", "packed_last")
def test_cotangents_may_have_any_layout(spec: OpSpec, case: Case) -> None:
    operator = spec.operator(case.operator)
    inputs = case.make(torch.float64, 6)
    plain = cotangents_of(operator, inputs, 7)
    for layout in (transposed, lambda t: t[:1, :1, :1].expand(t.shape), sliced):
        cotangents = {name: layout(t) for name, t in plain.items()}
        got = differentiated(operator, inputs, cotangents)
        expected = differentiated(operator.reference, inputs, cotangents)
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)


@on_each("many_units", "last_many_units", "packed_many_units")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_do_not_depend_on_threads(spec: OpSpec, case: Case, dtype: torch.dtype) -> None:
    operator = spec.operator(case.operator)
    inputs = case.make(dtype, 8)
    cotangents = cotangents_of(operator, inputs, 9)
    before = torch.get_num_threads()
    try:
        runs = []
        for threads in (1, 2, 3, 7, 2):
            torch.set_num_threads(threads)
            runs.append(differentiated(operator, inputs, cotangents))
    finally:
        torch.set_num_threads(before)
    for run in runs[1:]:
        for name, value in run.items():
            assert torch.equal(value, runs[0][name]), name


@on_each("channels_37", "last_chunks_3", "packed", "packed_last")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["x", "weight", "bias"])
def test_nan_and_inf_spread_as_in_the_reference(
    spec: OpSpec, case: Case, name: str, value: float
) -> None:
    operator = spec.operator(case.operator)
    inputs = case.make(torch.float32, 10)
    first_row = inputs[name][(0,) * (inputs[name].dim() - 1)]
    first_row[len(first_row) // 2] = value
    assert operator.backward is not None
    gradient = spec.operator(operator.backward)
    cotangents = cotangents_of(operator, inputs, 11)
    saved = spec.backward_inputs(operator, inputs, cotangents).values()
    got = (*operator(*inputs.values()), *gradient(*saved))
    expected = (*operator.reference(*inputs.values()), *gradient.reference(*saved))
    if case.operator == "causal_conv1d" or name != "x":  # an x at padding has no part in anything
        assert not all(y.isfinite().all() for y in expected)
    for index, (y, z) in enumerate(zip(got, expected, strict=True)):
        assert torch.equal(y.isnan(), z.isnan()), index
        assert torch.equal(y.isposinf(), z.isposinf()), index
        assert torch.equal(y.isneginf(), z.isneginf()), index


@pytest.mark.in_turn(CASES, [torch.float32, torch.bfloat16], IN_ALL_DTYPES)
def test_fake_has_the_strides_of_the_kernel_and_of_the_reference(
    spec: OpSpec, case: Case, dtype: torch.dtype
) -> None:
    forward = spec.operator(case.operator)
    for operator, x in (
        (forward, case.make(dtype, 0)),
        backward_inputs(spec, case, dtype),
    ):
        with FakeTensorMode() as mode:
            fake_inputs = [mode.from_tensor(v) if isinstance(v, Tensor) else v for v in x.values()]
            fakes = operator(*fake_inputs)
        for fake, real, plain in zip(
            fakes, operator(*x.values()), operator.reference(*x.values()), strict=True
        ):
            assert fake.shape == real.shape == plain.shape
            assert fake.stride() == real.stride() == plain.stride()
            assert fake.dtype == real.dtype == plain.dtype


@on_each(
    *("plain", "without_silu", "width_1", "no_steps", "empty_batch", "wide_weight"),
    *("last_chunks_3", "packed", "packed_last", *(n for n in CASE if n.startswith("layout"))),
)
def test_opcheck(spec: OpSpec, case: Case) -> None:
    inputs = case.make(torch.float32, 0)
    for value in floating(inputs).values():
        value.requires_grad_()
    torch.library.opcheck(overload(case.operator), tuple(inputs.values()))
    gradient, saved = backward_inputs(spec, case, torch.float32)
    torch.library.opcheck(overload(gradient.name), tuple(saved.values()))


def test_native_schemas_are_those_of_the_spec(spec: OpSpec) -> None:
    for operator in spec.operators:
        declared = str(overload(operator.name)._schema)
        assert declared == operator.qualified_name + operator.schema


@on_each("plain", "packed")
def test_gradients_of_gradients_are_refused(spec: OpSpec, case: Case) -> None:
    inputs = case.make(torch.float64, 0)
    x = inputs["x"].requires_grad_()
    out, _ = spec.operator(case.operator)(*inputs.values())
    (dx,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=rf"derivative for fuseport::{case.operator}_backward"):
        torch.autograd.grad(dx.sum(), x)


# What is wrong, and how to make it of good inputs.
BAD: dict[str, Callable[[Inputs], dict[str, Tensor]]] = {
    "x is 2-D": lambda x: {"x": x["x"][0]},
    "x is of integers": lambda x: {"x": x["x"].long()},
    "weight is 3-D": lambda x: {"weight": x["weight"][:, None]},
    "weight has other channels": lambda x: {"weight": x["weight"][1:]},
    "weight has no width": lambda x: {"weight": x["weight"][:, :0]},
    "weight is float64": lambda x: {"weight": x["weight"].double()},
    "weight is half": lambda x: {"weight": x["weight"].half()},
    "weight is on another device": lambda x: {"weight": x["weight"].to("meta")},
    "bias is longer": lambda x: {"bias": torch.cat([x["bias"]] * 2)},
    "bias is half": lambda x: {"bias": x["bias"].half()},
}
BAD_STATES: dict[str, Callable[[Inputs], dict[str, Tensor]]] = {
    "initial_states is of width W": lambda x: {"initial_states": x["x"][..., :4]},
    "initial_states is half": lambda x: {"initial_states": x["initial_states"].half()},
}
BAD_PACKING: dict[str, Callable[[Inputs], dict[str, Tensor]]] = {
    "seq_idx is int64": lambda x: {"seq_idx": x["seq_idx"].long()},
    "seq_idx is shorter": lambda x: {"seq_idx": x["seq_idx"][:, 1:]},
    "seq_idx is 1-D": lambda x: {"seq_idx": x["seq_idx"][0]},
}
BAD_COTANGENTS: dict[str, Callable[[Inputs], dict[str, Tensor]]] = {
    "dout is shorter": lambda x: {"dout": x["dout"][..., 1:]},
    "dout is float64": lambda x: {"dout": x["dout"].double()},
    "dfinal_states is 2-D": lambda x: {"dfinal_states": x["dfinal_states"][0]},
    "x is 2-D in backward": lambda x: {"x": x["x"][0]},
}


def message(run: Callable[..., object], inputs: Inputs) -> str:
    with pytest.raises(ValueError, match=r"fuseport::\w+: \w+ must be .*; got ") as caught:
        run(*inputs.values())
    return str(caught.value)


@pytest.mark.parametrize("what", [*BAD, *BAD_STATES, *BAD_PACKING, *BAD_COTANGENTS])
@pytest.mark.parametrize("name", ["plain", "packed"])
def test_bad_inputs_are_refused_alike_by_kernel_reference_and_fake(
    spec: OpSpec, what: str, name: str
) -> None:
    if what in (BAD_PACKING if name == "plain" else BAD_STATES):
        return
    forward = (spec.operator(CASE[name].operator), CASE[name].make(torch.float32, 1))
    backward = backward_inputs(spec, CASE[name], torch.float32)
    change = (BAD | BAD_STATES | BAD_PACKING | BAD_COTANGENTS)[what]
    for operator, good in (backward,) if what in BAD_COTANGENTS else (forward, backward):
        inputs = good | change(good)
        expected = message(operator.reference, inputs)
        (changed,) = change(good)
        assert expected.startswith(f"fuseport::{operator.name}: {changed} must be ")
        assert message(operator, inputs) == expected
        with FakeTensorMode() as mode:
            fakes = {
                k: mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in inputs.items()
            }
            assert message(operator, fakes) == expected


def test_what_only_the_public_function_can_refuse(spec: OpSpec) -> None:
    x = CASE["packed"].make(torch.float32, 0)
    with pytest.raises(ValueError, match="activation must be None, 'silu' or 'swish'; got 'gelu'"):
        causal_conv1d(x["x"], x["weight"], activation="gelu")
    with pytest.raises(ValueError, match="initial_states must be None where seq_idx is given"):
        causal_conv1d(x["x"], x["weight"], None, x["seq_idx"], x["x"][..., :3])


@pytest.mark.parametrize("strict", [False, True])
def test_export_keeps_batch_and_length_open(spec: OpSpec, strict: bool) -> None:
    class Conv(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(6, 4))

        def forward(self, h: Tensor) -> Tensor:
            return causal_conv1d(h.transpose(1, 2), self.weight, activation="silu")

    model = Conv()
    dims = {0: torch.export.Dim("b", min=1), 1: torch.export.Dim("l", min=1)}
    program = torch.export.export(
        model, (torch.randn(2, 9, 6),), dynamic_shapes=(dims,), strict=strict
    )
    ranges = list(program.range_constraints.values())
    assert len(ranges) == 2
    assert all(int(r.lower) <= 1 and r.upper > 10**6 for r in ranges)
    for b, l in ((1, 1), (1, 3), (3, 65)):  # noqa: E741
        h = torch.randn(b, l, 6)
        torch.testing.assert_close(program.module()(h), model(h))


LESSER_ISA = """
import torch
from fuseport.ops import OPS, register
register("causal_conv1d")
spec = OPS["causal_conv1d"]
worst = 0.0
for case in spec.cases:
    for dtype in (torch.float32, torch.float64):
        inputs = case.make(dtype, 0)
        operator = spec.operator(case.operator)
        outputs = operator.reference(*inputs.values())
        cotangents = {"dout": torch.ones_like(outputs[0]), "dfinal_states": outputs[1].sin()}
        gradient = spec.operator(operator.backward)
        saved = spec.backward_inputs(operator, inputs, cotangents).values()
        pairs = [*zip(operator(*inputs.values()), outputs)]
        pairs += [*zip(gradient(*saved), gradient.reference(*saved))]
        for got, wanted in pairs:
            if wanted.numel():
                scale = wanted.abs().max() + 1e-3
                error = (got - wanted).abs().max() / scale / torch.finfo(dtype).eps
                worst = max(worst, float(error)) if error == error else float("inf")
print(worst)
"""


@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_lesser_instruction_sets_compute_the_same(spec: OpSpec, isa: str, run_python: Run) -> None:
    done = run_python(LESSER_ISA, FUSEPORT_ISA=isa)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 100, "ulps of a tensor's scale"


FALLBACK = """
import torch
from fuseport.ops import OPS, register
assert register("causal_conv1d") == {"causal_conv1d": "reference"}
spec = OPS["causal_conv1d"]
for case in spec.cases:
    if case.name in {"plain", "packed", "layout_split_projection"}:
        inputs = list(case.make(torch.float64, 0).values())
        for x in inputs:
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                x.requires_grad_()
        overload = getattr(torch.ops.fuseport, case.operator).default
        torch.library.opcheck(overload, tuple(inputs))
        tensors = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
        run = lambda *given: overload(*given)
        assert torch.autograd.gradcheck(run, tuple(inputs), fast_mode=True)
for operator in spec.operators:
    overload = getattr(torch.ops.fuseport, operator.name).default
    assert str(overload._schema) == operator.qualified_name + operator.schema
"""


def test_without_a_compiler_the_reference_does_it_all(run_python: Run) -> None:
    done = run_python(FALLBACK, FUSEPORT_NATIVE="0")
    assert done.returncode == 0, done.stderr
