"""The selective scan computes what it says: values and gradients, all cases, all dtypes."""

import math
import os
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fuseport.ops import OPS
from fuseport.ops.case_layouts import (
    expanded_first,
    expanded_last,
    offset_channels,
    sliced,
    transposed,
)
from fuseport.ops.selective_scan import reference, selective_scan
from fuseport.ops.selective_scan.cases import CASES, _Shape
from fuseport.ops.spec import FLOATING, Case, Inputs, Operator, OpSpec

CASE = {case.name: case for case in CASES}


def on_each(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [CASE[n] for n in names or CASE], ids=lambda c: c.name)


def wide(dtype: torch.dtype) -> torch.dtype:
    """float64, or complex128 for complex numbers."""
    return torch.promote_types(dtype, torch.float64)


def widened(inputs: Inputs) -> Inputs:
    return {k: v.to(wide(v.dtype)) if isinstance(v, Tensor) else v for k, v in inputs.items()}


def tensors(inputs: Inputs) -> dict[str, Tensor]:
    return {name: value for name, value in inputs.items() if isinstance(value, Tensor)}


def cotangents_of(operator: Operator, inputs: Inputs, seed: int) -> dict[str, Tensor]:
    """Random, in the shapes and dtypes of out and last_state."""
    generator = torch.Generator().manual_seed(seed)
    outputs = operator.fake(*inputs.values())[:2]
    return {
        "d" + name: torch.randn(y.shape, generator=generator, dtype=wide(y.dtype)).to(y.dtype)
        for name, y in zip(operator.outputs[:2], outputs, strict=True)
    }


def differentiated(
    run: Callable[..., tuple[Tensor, ...]], inputs: Inputs, cotangents: dict[str, Tensor]
) -> dict[str, Tensor]:
    """out and last_state, and the gradients of all tensors by autograd; zeros for None."""
    leaves = {
        name: value.detach().requires_grad_() if isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }
    out, last_state, chunk_states = run(*leaves.values())
    assert not chunk_states.requires_grad
    wanted = tensors(leaves)
    # A scan of no steps leaves the reference's last state a constant.
    pairs = [
        (y, dy)
        for y, dy in zip((out, last_state), cotangents.values(), strict=True)
        if y.requires_grad
    ]
    gradients = torch.autograd.grad(
        [y for y, _ in pairs],
        tuple(wanted.values()),
        [dy for _, dy in pairs],
        allow_unused=True,
        materialize_grads=True,
    )
    named = {f"d{name}": g for name, g in zip(wanted, gradients, strict=True)}
    return {"out": out.detach(), "last_state": last_state.detach(), **named}


def assert_as_good(
    got: dict[str, Tensor],
    baseline: dict[str, Tensor],
    truth: Inputs,
    factor: float = 3,
    scale: float = 0,
) -> None:
    """Errors of at most `factor` times the baseline's, and a few ulps of the tensor's scale.

    `scale` is the least that counts as such, for sums whose terms cancel.
    """
    assert got.keys() == baseline.keys() == truth.keys()
    for name, value in got.items():
        expected = truth[name]
        assert value.shape == expected.shape, name
        assert value.dtype == baseline[name].dtype, name
        if value.numel() == 0:
            continue
        error = (value.to(expected.dtype) - expected).abs().max()
        allowed = factor * (baseline[name].to(expected.dtype) - expected).abs().max()
        # In float64 the truth is the baseline itself, so that the ulps must suffice.
        ulps = 64 if value.dtype == expected.dtype else 4
        allowed += ulps * torch.finfo(value.dtype).eps * expected.abs().max().clamp(min=scale)
        assert error <= allowed, f"{name}: off by {error:.3g}, allowed {allowed:.3g}"


@pytest.mark.parametrize("dtype", CASES[0].dtypes, ids=str)
@on_each()
def test_kernel_is_as_good_as_the_reference(spec: OpSpec, case: Case, dtype: torch.dtype) -> None:
    operator = spec.operator(case.operator)
    inputs = case.make(dtype, 1)
    cotangents = cotangents_of(operator, inputs, 2)
    truth = differentiated(operator.reference, widened(inputs), widened(cotangents))
    baseline = differentiated(operator.reference, inputs, cotangents)
    assert_as_good(differentiated(operator, inputs, cotangents), baseline, truth)


@on_each()
def test_backward_of_the_reference_is_autograd_of_its_forward(spec: OpSpec, case: Case) -> None:
    operator = spec.operator(case.operator)
    assert operator.backward is not None
    gradient = spec.operator(operator.backward)
    inputs = case.make(torch.float64, 3)
    cotangents = cotangents_of(operator, inputs, 4)
    expected = differentiated(operator.reference, inputs, cotangents)
    results = gradient.reference(*spec.backward_inputs(operator, inputs, cotangents).values())
    for name, result in zip(gradient.outputs, results, strict=True):
        torch.testing.assert_close(result, expected[name], rtol=1e-10, atol=1e-10)


@on_each(
    *("gated", "bare", "one_of_everything", "2d_coefficients", "groups_mixed_ranks", "states_1"),
    *("complex_gated", "complex_2d_B", "complex_2d_C", "complex_2d_coefficients"),
)
def test_gradcheck(spec: OpSpec, case: Case) -> None:
    operator = spec.operator(case.operator)
    inputs = case.make(torch.float64, 5)
    for value in tensors(inputs).values():
        value.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda *x: operator(*x)[:2], tuple(inputs.values()), fast_mode=True, nondet_tol=0.0
    )


@on_each("gated", "channels_37", "groups_differ", "complex_gated", "complex_channels_37")
def test_cotangents_may_have_any_layout(spec: OpSpec, case: Case) -> None:
    operator = spec.operator(case.operator)
    inputs = case.make(torch.float64, 6)
    plain = cotangents_of(operator, inputs, 7)
    for layout in (
        lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        lambda t: t[:1, :1, :1].expand(t.shape),
        lambda t: torch.stack([t, t], -1)[..., 1],
    ):
        cotangents = {name: layout(t) for name, t in plain.items()}
        got = differentiated(operator, inputs, cotangents)
        expected = differentiated(operator.reference, inputs, cotangents)
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)


@on_each("many_units", "long", "complex_many_units")
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


# With one channel, lanes of a vector that stand for none must not make NaN of an infinite sum.
@on_each("channels_37", "layout_channels_last_channel_1", "long")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["u", "delta", "A", "B", "C", "D", "z", "delta_bias"])
def test_nan_and_inf_spread_as_in_the_reference(
    spec: OpSpec, case: Case, name: str, value: float
) -> None:
    operator = spec.operator("selective_scan_gated")
    inputs = case.make(torch.float32, 10)
    first_row = inputs[name][(0,) * (inputs[name].dim() - 1)]
    first_row[len(first_row) // 2] = value
    cotangents = cotangents_of(operator, inputs, 11)
    assert operator.backward is not None
    gradient = spec.operator(operator.backward)
    backward_inputs = spec.backward_inputs(operator, inputs, cotangents).values()
    got = (*operator(*inputs.values()), *gradient(*backward_inputs))
    expected = (*operator.reference(*inputs.values()), *gradient.reference(*backward_inputs))
    if math.isnan(value):
        assert any(y.isnan().any() for y in expected)
    for index, (y, z) in enumerate(zip(got, expected, strict=True)):
        assert torch.equal(y.isnan(), z.isnan()), index
        assert torch.equal(y.isposinf(), z.isposinf()), index
        assert torch.equal(y.isneginf(), z.isneginf()), index


def scanned_step(step: Tensor, A: Tensor, length: int) -> Tensor:
    """What a step makes of states that are 1, for each channel, by a scan of some length."""
    first, rest = torch.zeros(2, 1, len(step), length, dtype=step.dtype)
    first[..., 0] = 1
    rest[..., length // 2 + length % 2] = 1
    ones = torch.ones(1, A.shape[1], length, dtype=step.dtype)
    delta = torch.where(rest == 1, step[None, :, None], first)
    _, last = selective_scan(first, delta, A, ones, ones, return_last_state=True)
    return last[0]


# Long scans of sixteen states have tables of decays.
lengths_and_states = pytest.mark.parametrize(("length", "N"), [(2, 2), (651, 16)])


@lengths_and_states
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_exp_is_as_exact_as_its_rounded_argument(dtype: torch.dtype, length: int, N: int) -> None:
    low, high = (-110.0, 90.0) if dtype == torch.float32 else (-750.0, 712.0)
    rate = 1.375  # which leaves tables' rows as far apart as they may be
    x = torch.linspace(low / rate, high / rate, 20001, dtype=torch.float64).to(dtype)
    x = torch.cat([x, x / 1000, torch.tensor([0.0, -0.0, math.inf, -math.inf], dtype=dtype)])
    got = scanned_step(-x, torch.full((len(x), N), -rate, dtype=dtype), length)
    infinite = x.isinf()
    assert got[infinite].isnan().all()  # 0·Inf in the drive
    got, x = got[~infinite], x[~infinite, None].expand(-1, N)
    expected = (rate * x.double()).exp()
    rounded = expected.to(dtype)
    assert torch.equal(got.isinf(), rounded.isinf())
    finite = rounded.isfinite()
    # log2(e)·A is rounded, and so is its product with delta: half an ulp of the exponent each.
    relative = torch.finfo(dtype).eps * (1 + rate * x[finite].double().abs())
    error = (got.double() - expected)[finite].abs()
    assert (error <= relative * expected[finite] + torch.finfo(dtype).smallest_normal).all()
    assert (got[x == 0] == 1).all()


@lengths_and_states
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rate", [-1.0, -1e-6, -1e30])
def test_steps_of_any_size_leave_nothing_of_the_state(
    dtype: torch.dtype, rate: float, length: int, N: int
) -> None:
    # δ·A from what is small to beyond all numbers, in channels whose other state decays not at all.
    delta = torch.logspace(-3, 37, 81, dtype=torch.float64).to(dtype)
    A = torch.tensor([rate, *[0.0] * (N - 1)], dtype=dtype).repeat(len(delta), 1)
    step = delta.requires_grad_()
    last = scanned_step(step, A, length)
    (gradient,) = torch.autograd.grad(last.sum(), step)
    power = delta.detach().double() * rate
    expected = torch.stack([power.exp(), *[torch.ones_like(power)] * (N - 1)], 1)
    assert last.shape == expected.shape
    assert torch.allclose(last.double(), expected, rtol=2e-5, atol=1e-30)
    assert torch.allclose(gradient.double(), rate * power.exp(), rtol=2e-5, atol=1e-30)


@pytest.mark.parametrize(("length", "N"), [(70, 3), (651, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("step", [1e3, 1e30, math.nan])
def test_far_steps_of_one_channel_leave_the_bits_of_others(
    dtype: torch.dtype, step: float, length: int, N: int
) -> None:
    # Where all powers of some steps and channels are in bounds, exponentials take a shorter way.
    generator = torch.Generator().manual_seed(4)
    d = 8
    delta = torch.rand(1, d, length, generator=generator, dtype=dtype)
    u, B, C = (torch.randn(1, rows, length, generator=generator, dtype=dtype) for rows in (d, N, N))
    A = -torch.rand(d, N, generator=generator, dtype=dtype)
    far = delta.clone()
    far[0, -1, [5, 40, length - 1]] = step
    found = []
    for steps in (delta, far):
        leaves = [x.clone().requires_grad_() for x in (u, steps, A)]
        out = selective_scan(*leaves, B, C)
        gradients = torch.autograd.grad(out[:, :-1].sin().sum(), leaves)
        found.append([out[0, :-1], *(g.reshape(d, -1)[:-1] for g in gradients)])
    for near, beside_far in zip(*found, strict=True):
        assert near.abs().max() > 0
        assert torch.equal(near, beside_far)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_softplus_and_its_slope_are_exact_to_a_few_ulps(dtype: torch.dtype) -> None:
    x = torch.cat([torch.linspace(-85, 90, 20001), torch.linspace(19.99, 20.01, 99)]).to(dtype)
    d = len(x)
    ones, raw = torch.ones(1, d, 1, dtype=dtype), x[None, :, None].requires_grad_()
    A, one = -torch.zeros(d, 1, dtype=dtype), torch.ones(1, 1, 1, dtype=dtype)
    _, last = selective_scan(ones, raw, A, one, one, delta_softplus=True, return_last_state=True)
    (slope,) = torch.autograd.grad(last.sum(), raw)
    wide = x.detach().double()
    expected = torch.where(wide > 20, wide, wide.exp().log1p())
    expected_slope = torch.where(wide > 20, 1.0, wide.sigmoid())
    eps = torch.finfo(dtype).eps
    assert ((last.flatten().double() - expected).abs() <= 4 * eps * expected).all()
    assert ((slope.flatten().double() - expected_slope).abs() <= 4 * eps * expected_slope).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_types_are_read_and_rounded_as_torch_does(spec: OpSpec, dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    u = every.reshape(1, 256, 256)
    zeros = torch.zeros(1, 1, 256, dtype=dtype)
    generator = torch.Generator().manual_seed(12)
    for D in (torch.ones(256), torch.rand(256, generator=generator) * 3):
        out = selective_scan(u, torch.zeros_like(u), torch.zeros(256, 1), zeros, zeros, D)
        expected = (u.float() * D[:, None]).to(dtype)
        # Zero steps of an infinite input make NaN of the state, and so of every later output.
        rows = u.isfinite().all(-1)
        assert rows.any()
        assert torch.equal(out[rows], expected[rows])


def test_state_is_not_rounded_to_half_before_the_output(spec: OpSpec) -> None:
    """The slow path of a well-known library does that; its outputs drift."""
    inputs = CASE["chunks_3_minus_1"].make(torch.float16, 13)
    operator = spec.operator("selective_scan_gated")
    exact = operator.reference(*widened(inputs).values())[1]
    state = operator(*inputs.values())[1]
    assert state.dtype == torch.float32
    assert (state - exact).abs().max() < 1e-5 * exact.abs().max()


@on_each("no_steps", "chunk", "chunks_3_minus_1", "channels_37", "complex_channels_37")
def test_saved_states_are_those_at_the_borders_of_chunks(spec: OpSpec, case: Case) -> None:
    operator = spec.operator(case.operator)
    inputs = case.make(torch.float64, 17)
    _, last_state, chunk_states = operator(*inputs.values())
    expected = operator.reference(*inputs.values())[2]
    torch.testing.assert_close(chunk_states, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(chunk_states[:, -1].mT, last_state)
    assert not chunk_states[:, 0].any()


def test_three_calls_in_a_row_agree(spec: OpSpec) -> None:
    operator = spec.operator("selective_scan_gated")
    inputs = CASE["channels_130"].make(torch.float32, 14)
    cotangents = cotangents_of(operator, inputs, 15)
    first, second, third = (differentiated(operator, inputs, cotangents) for _ in range(3))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
        assert torch.equal(value, third[name]), name


def test_public_function_fills_in_what_is_absent(spec: OpSpec) -> None:
    x = CASE["gated"].make(torch.float64, 16)
    zeros = torch.zeros_like(x["D"])
    core = (x["u"], x["delta"], x["A"], x["B"], x["C"])
    for D in (None, x["D"]):
        for z in (None, x["z"]):
            for bias in (None, x["delta_bias"]):
                out, last = selective_scan(*core, D, z, bias, True, return_last_state=True)
                rest = (zeros if D is None else D, zeros if bias is None else bias)
                if z is None:
                    expected = reference.selective_scan(*core, *rest, True)
                else:
                    expected = reference.selective_scan_gated(*core, rest[0], z, rest[1], True)
                torch.testing.assert_close((out, last), expected[:2])
                alone = selective_scan(*core, D, z, bias, True)
                assert isinstance(alone, Tensor)
                assert torch.equal(alone, out)


def test_the_reference_follows_the_definition_step_by_step() -> None:
    """Numbers small enough to follow by hand: b = d = N = 1, two steps, A = -1."""
    u, delta = torch.tensor([[[2.0, 3.0]]]), torch.tensor([[[0.5, 0.25]]])
    A, D, bias = torch.tensor([[-1.0]]), torch.tensor([10.0]), torch.tensor([0.5])
    B, C = torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[3.0, 4.0]]])
    first = 1.0 * 2 * 1
    second = math.exp(-0.75) * first + 0.75 * 3 * 2
    out, last, _ = reference.selective_scan(u, delta, A, B, C, D, bias, False)
    torch.testing.assert_close(out, torch.tensor([[[3 * first + 20, 4 * second + 30]]]))
    torch.testing.assert_close(last, torch.tensor([[[second]]]))


def test_cases_are_reproducible_and_named_once() -> None:
    assert len(CASE) == len(CASES)
    for case in CASES:
        assert case.operator in {operator.name for operator in OPS["selective_scan"].operators}
        for first, second in zip(
            case.make(torch.float32, 0).values(), case.make(torch.float32, 0).values(), strict=True
        ):
            assert torch.equal(torch.as_tensor(first), torch.as_tensor(second))


def random_case(seed: int) -> tuple[Case, torch.dtype]:
    """Any shape, dtype, options, groups and memory layouts, drawn from a seed."""
    draw = random.Random(seed)
    groups, kind = draw.choice([1, 1, 1, 2, 3]), draw.choice(["both", "both", "both", "mixed"])
    options: list[int | None] = [groups, 0 if groups == 1 else groups, None]
    B_groups = options[0] if kind == "both" else draw.choice(options)
    C_groups = B_groups if kind == "both" else draw.choice(options)
    layouts = [None, None, transposed, sliced, offset_channels, expanded_first, expanded_last]
    drawn = {name: draw.choice(layouts) for name in ("u", "delta", "B", "C", "z")}
    constant = {"B": B_groups is None, "C": C_groups is None}
    gated, softplus = draw.random() < 0.5, draw.random() < 0.7
    shape = _Shape(
        b=draw.choice([1, 1, 2, 3]),
        d=groups * draw.choice([1, 2, 5, 16, 17, 33]),
        l=draw.choice([1, 2, 15, 16, 17, 63, 64, 65, draw.randint(1, 200)]),
        N=draw.choice([1, 2, 3, 4, 7, 8, 9, 16, 17]),
        B_groups=B_groups,
        C_groups=C_groups,
        skip=draw.random() < 0.7,
        gated=gated,
        bias=softplus and draw.random() < 0.7,  # no negative steps, whose states explode
        softplus=softplus,
        layouts={
            name: layout
            for name, layout in drawn.items()
            if layout is not None and not constant.get(name) and (gated or name != "z")
        },
    )
    if draw.random() < 0.1:  # long enough for tables of decays
        d = groups * draw.choice([1, 5, 17])
        shape = replace(shape, b=1, d=d, l=draw.randint(600, 1200), N=16)
    operator = "selective_scan_gated" if gated else "selective_scan"
    return Case(str(shape), operator, shape.make), draw.choice(FLOATING)


def test_random_scans(spec: OpSpec) -> None:
    """FUSEPORT_RANDOM_SCANS says how many; the seed of one that fails is in the message."""
    for seed in range(int(os.environ.get("FUSEPORT_RANDOM_SCANS", "200"))):
        case, dtype = random_case(seed)
        operator = spec.operator(case.operator)
        inputs = case.make(dtype, seed)
        cotangents = cotangents_of(operator, inputs, seed + 1)
        truth = differentiated(operator.reference, widened(inputs), widened(cotangents))
        baseline = differentiated(operator.reference, inputs, cotangents)
        got = differentiated(operator, inputs, cotangents)
        try:
            # One baseline of many scans is sometimes lucky; an error of indexing is never small.
            assert_as_good(got, baseline, truth, factor=10, scale=8)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, {dtype}, {case.name}: {error}") from error
