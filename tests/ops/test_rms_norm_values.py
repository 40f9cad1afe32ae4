"""The norms compute what they say: values and gradients, all cases, all dtypes, both orders."""

import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.ops import OPS, register
from fuseport.ops.rms_norm import rms_norm
from fuseport.ops.rms_norm.cases import NormShape
from fuseport.ops.rms_norm_gated import rms_norm_gated
from fuseport.ops.spec import FLOATING, Case, Inputs, Operator, OpSpec

SPECS = {name: OPS[name] for name in ("rms_norm", "rms_norm_gated")}
CASES = [case for spec in SPECS.values() for case in spec.cases]
IN_ALL_DTYPES = (
    "groups",
    "channels_17",
    "weight_of_xs_dtype",
    "weight_of_xs_dtype_in_groups",
    "weight_of_xs_dtype_gate_before_norm",
)


@pytest.fixture(autouse=True)
def _native() -> None:
    assert set(register(*SPECS).values()) == {"native"}


def on_each(*names: str) -> pytest.MarkDecorator:
    cases = [c for c in CASES if not names or c.name in names]
    return pytest.mark.parametrize("case", cases, ids=lambda c: f"{c.operator}-{c.name}")


def of(case: Case) -> tuple[OpSpec, Operator, Operator]:
    """The case's op, operator and the backward of that."""
    spec = SPECS[case.operator]
    operator = spec.operator(case.operator)
    return spec, operator, spec.operator(operator.backward or "")


def widened(inputs: Inputs) -> Inputs:
    return {k: v.double() if isinstance(v, Tensor) else v for k, v in inputs.items()}


def cotangent_of(inputs: Inputs, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = inputs["x"]
    return torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)


def differentiated(
    run: Callable[..., tuple[Tensor, ...]], inputs: Inputs, cotangent: Tensor
) -> dict[str, Tensor]:
    """out, rstd, and the gradients of all tensors by autograd."""
    leaves = {
        name: value.detach().requires_grad_() if isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }
    out, rstd = run(*leaves.values())
    assert not rstd.requires_grad
    wanted = {name: value for name, value in leaves.items() if isinstance(value, Tensor)}
    gradients = torch.autograd.grad(out, list(wanted.values()), cotangent)
    named = {f"d{name}": g for name, g in zip(wanted, gradients, strict=True)}
    return {"out": out.detach(), "rstd": rstd, **named}


def assert_as_good(
    got: dict[str, Tensor], baseline: dict[str, Tensor], truth: dict[str, Tensor]
) -> None:
    """The error is at most twice the baseline's, and a few ulps of the tensor's scale.

    Scales below 1 count as 1, for terms that cancel.
    """
    assert got.keys() == baseline.keys() == truth.keys()
    for name, value in got.items():
        expected = truth[name]
        assert value.shape == expected.shape, name
        assert value.dtype == baseline[name].dtype, name
        if value.numel() == 0:
            continue
        error = (value.double() - expected).abs().max()
        allowed = 2 * (baseline[name].double() - expected).abs().max()
        # In float64 the truth is the baseline itself, so that the ulps must suffice.
        ulps = 64 if value.dtype == expected.dtype else 4
        allowed += ulps * torch.finfo(value.dtype).eps * expected.abs().max().clamp(min=1)
        assert error <= allowed, f"{name}: off by {error:.3g}, allowed {allowed:.3g}"


@pytest.mark.in_turn(CASES, FLOATING, IN_ALL_DTYPES)
def test_kernel_is_as_good_as_the_reference(case: Case, dtype: torch.dtype) -> None:
    _, operator, _ = of(case)
    inputs = case.make(dtype, 1)
    cotangent = cotangent_of(inputs, 2)
    truth = differentiated(operator.reference, widened(inputs), cotangent.double())
    baseline = differentiated(operator.reference, inputs, cotangent)
    assert_as_good(differentiated(operator, inputs, cotangent), baseline, truth)


@on_each()
def test_backward_of_the_reference_is_autograd_of_its_forward(case: Case) -> None:
    spec, operator, gradient = of(case)
    inputs = case.make(torch.float64, 3)
    cotangent = cotangent_of(inputs, 4)
    expected = differentiated(operator.reference, inputs, cotangent)
    saved = spec.backward_inputs(operator, inputs, {"dout": cotangent})
    for name, result in zip(gradient.outputs, gradient.reference(*saved.values()), strict=True):
        torch.testing.assert_close(result, expected[name], rtol=1e-10, atol=1e-10)


@on_each(
    *("plain", "plain_gate_before_norm", "groups", "groups_gate_before_norm", "channels_17"),
    *("one_of_everything", "layout_channels_first_x", "layout_channels_first_x_gate_before_norm"),
)
def test_gradcheck(case: Case) -> None:
    _, operator, _ = of(case)
    inputs = case.make(torch.float64, 5)
    for value in inputs.values():
        if isinstance(value, Tensor):
            value.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda *x: operator(*x)[0], tuple(inputs.values()), fast_mode=True, nondet_tol=0.0
    )


@on_each("plain", "channels_65", "rows_67", "groups_gate_before_norm", "four_dimensions")
def test_cotangents_may_have_any_layout(case: Case) -> None:
    _, operator, _ = of(case)
    inputs = case.make(torch.float64, 6)
    plain = cotangent_of(inputs, 7)
    for layout in (
        lambda t: t.mT.contiguous().mT,
        lambda t: t[:1, ..., :1].expand(t.shape),
        lambda t: torch.stack([t, t], -1)[..., 1],
        lambda t: t.movedim(0, 1).contiguous().movedim(1, 0),
    ):
        cotangent = layout(plain)
        got = differentiated(operator, inputs, cotangent)
        expected = differentiated(operator.reference, inputs, cotangent)
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)


@on_each("many_units", "many_units_gate_before_norm")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_do_not_depend_on_threads(case: Case, dtype: torch.dtype) -> None:
    _, operator, _ = of(case)
    inputs = case.make(dtype, 8)
    cotangent = cotangent_of(inputs, 9)
    before = torch.get_num_threads()
    try:
        runs = []
        for threads in (1, 2, 3, 7, 2):
            torch.set_num_threads(threads)
            runs.append(differentiated(operator, inputs, cotangent))
    finally:
        torch.set_num_threads(before)
    for run in runs[1:]:
        for name, value in run.items():
            assert torch.equal(value, runs[0][name]), name


@on_each("many_units", "many_units_gate_before_norm")
def test_bits_do_not_depend_on_memory_layout(case: Case) -> None:
    _, operator, _ = of(case)
    inputs = case.make(torch.float32, 8)
    cotangent = cotangent_of(inputs, 9)
    expected = differentiated(operator, inputs, cotangent)
    transposed = {
        k: v.mT.contiguous().mT if isinstance(v, Tensor) and v.dim() > 1 else v
        for k, v in inputs.items()
    }
    for name, value in differentiated(operator, transposed, cotangent).items():
        assert torch.equal(value, expected[name]), name


# Lanes of a vector that stand for no channel must not make NaN of an infinite sum.
@on_each("channels_17", "channels_17_gate_before_norm", "layout_channels_first_channel_1")
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0])
@pytest.mark.parametrize("name", ["x", "z", "weight"])
def test_nan_and_inf_spread_as_in_the_reference(case: Case, name: str, value: float) -> None:
    spec, operator, gradient = of(case)
    inputs = case.make(torch.float32, 10)
    if name not in inputs:
        assert operator.name == "rms_norm"
        return
    first_row = inputs[name][(0,) * (inputs[name].dim() - 1)]
    if value == 0.0:  # a row of zeros and no eps: 1/√0
        first_row[:], inputs["eps"] = 0.0, 0.0
    else:
        first_row[len(first_row) // 2] = value
    saved = spec.backward_inputs(operator, inputs, {"dout": cotangent_of(inputs, 11)}).values()
    got = (*operator(*inputs.values()), *gradient(*saved))
    expected = (*operator.reference(*inputs.values()), *gradient.reference(*saved))
    if math.isnan(value):
        assert any(y.isnan().any() for y in expected)
    for index, (y, z) in enumerate(zip(got, expected, strict=True)):
        assert torch.equal(y.isnan(), z.isnan()), index
        assert torch.equal(y.isposinf(), z.isposinf()), index
        assert torch.equal(y.isneginf(), z.isneginf()), index


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_the_plain_norm_is_torchs(dtype: torch.dtype) -> None:
    x = torch.randn(3, 5, 40, dtype=torch.float64).to(dtype)
    weight = torch.randn(40, dtype=torch.float64).to(dtype)
    expected = F.rms_norm(x.double(), (40,), weight.double(), 1e-3)
    got = rms_norm(x, weight, 1e-3)
    torch.testing.assert_close(got, expected.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("group_size", [24, 8])
def test_the_gate_before_the_norm_is_that_of_hugging_face(group_size: int) -> None:
    modeling = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    module = modeling.MambaRMSNormGated(24, group_size, eps=1e-5)
    with torch.no_grad():
        module.weight.normal_()
    x, z = torch.randn(2, 5, 24), torch.randn(2, 5, 24)
    got = rms_norm_gated(x, z, module.weight, 1e-5, group_size, norm_before_gate=False)
    torch.testing.assert_close(got, module(x, z), rtol=1e-5, atol=1e-6)
    other = rms_norm_gated(x, z, module.weight, 1e-5, group_size, norm_before_gate=True)
    assert not torch.allclose(other, module(x, z), rtol=1e-2)


def by_definition(args: SimpleNamespace) -> Tensor:
    """Number by number, in Python's floats."""
    d, size = args.x.shape[-1], args.group_size
    rows, gates = args.x.reshape(-1, d).tolist(), args.z.reshape(-1, d).tolist()
    out = []
    for row, gate in zip(rows, gates, strict=True):
        silu = [g / (1 + math.exp(-g)) for g in gate]
        v = row if args.before else [a * s for a, s in zip(row, silu, strict=True)]
        for c in range(d):
            first = c // size * size
            mean = sum(a * a for a in v[first : first + size]) / size
            y = v[c] / math.sqrt(mean + args.eps) * float(args.weight[c])
            out.append(y * silu[c] if args.before else y)
    return torch.tensor(out, dtype=torch.float64).reshape(args.x.shape)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("size", [12, 4])
def test_both_orders_follow_the_definition(before: bool, size: int) -> None:
    x, z = torch.randn(2, 3, 12, dtype=torch.float64), torch.randn(2, 3, 12, dtype=torch.float64)
    weight = torch.randn(12, dtype=torch.float64)
    args = SimpleNamespace(x=x, z=z, weight=weight, eps=1e-5, group_size=size, before=before)
    got = rms_norm_gated(x, z, weight, 1e-5, size, before)
    torch.testing.assert_close(got, by_definition(args), rtol=1e-12, atol=1e-12)


def test_all_channels_are_a_group_unless_a_size_is_given() -> None:
    inputs = NormShape((4, 12)).make(torch.float32, 0)
    x, weight = inputs["x"], inputs["weight"]
    assert torch.equal(rms_norm(x, weight), rms_norm(x, weight, 1e-5, 12))
    assert not torch.equal(rms_norm(x, weight), rms_norm(x, weight, 1e-5, 6))
    assert torch.equal(rms_norm_gated(x, x, weight), rms_norm_gated(x, x, weight, 1e-5, 12, True))


def test_three_calls_in_a_row_agree() -> None:
    [case] = [c for c in SPECS["rms_norm_gated"].cases if c.name == "many_units"]
    _, operator, _ = of(case)
    inputs = case.make(torch.float32, 14)
    runs = [differentiated(operator, inputs, cotangent_of(inputs, 15)) for _ in range(3)]
    for run in runs[1:]:
        for name, value in run.items():
            assert torch.equal(value, runs[0][name]), name


def test_cases_are_reproducible_and_named_once() -> None:
    for spec in SPECS.values():
        assert len({case.name for case in spec.cases}) == len(spec.cases)
    for case in CASES:
        first, second = case.make(torch.float32, 0), case.make(torch.float32, 0)
        for a, b in zip(first.values(), second.values(), strict=True):
            assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))
