"""The state update computes one step of the scan, alike in torch, under fakes and in ONNX."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fuseport.exporter.runtimes._onnxruntime import from_value, to_value
from fuseport.ops import OPS, onnxruntime_library, register
from fuseport.ops.selective_scan import selective_scan
from fuseport.ops.selective_state_update import selective_state_update
from fuseport.ops.spec import FLOATING, Case, Inputs, OpSpec

SPEC = OPS["selective_state_update"]
CASE = {case.name: case for case in SPEC.cases}
IN_ALL_DTYPES = ("gated", "state_of_inputs_dtype", "mamba_1")
LOWERING = SPEC.lowering()
# What tracing and dynamic shapes can tell apart; the others differ in sizes and values alone.
OPCHECKED = ("plain", "gated", "empty_batch", "layout_transposed", "layout_expanded_batch")
TYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.float64: TensorProto.DOUBLE,
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
}
RANKS = {"state": 4, "new_state": 4, "D": 2, "dt_bias": 2}
on_each = pytest.mark.parametrize("case", SPEC.cases, ids=lambda c: c.name)
on_dtypes = pytest.mark.parametrize("dtype", FLOATING, ids=str)
Run = Callable[..., "subprocess.CompletedProcess[str]"]  # noqa: F821


@pytest.fixture(scope="module", autouse=True)
def spec() -> OpSpec:
    """The op, registered from its native library."""
    assert register(SPEC.name)[SPEC.name] == "native"
    return SPEC


def widened(inputs: Inputs) -> list[Any]:
    return [v.double() if isinstance(v, Tensor) else v for v in inputs.values()]


@pytest.mark.in_turn(SPEC.cases, FLOATING, IN_ALL_DTYPES)
def test_kernel_is_as_good_as_the_reference(case: Case, dtype: torch.dtype) -> None:
    operator, inputs = SPEC.operator(case.operator), case.make(dtype, 1)
    truth = operator.reference(*widened(inputs))
    baseline, got = operator.reference(*inputs.values()), operator(*inputs.values())
    for y, plain, expected in zip(got, baseline, truth, strict=True):
        assert y.dtype == plain.dtype
        if y.numel():
            allowed = 3 * (plain - expected).abs().max()
            allowed += 8 * torch.finfo(y.dtype).eps * expected.abs().max()
            assert (y - expected).abs().max() <= allowed


@on_each
def test_reference_is_the_definition(case: Case) -> None:
    inputs = case.make(torch.float64, 2)
    out, new_state = SPEC.operator(case.operator).reference(*inputs.values())
    heads = inputs["x"].shape[1]
    for b, h, d in np.ndindex(*inputs["x"].shape):
        group = h // (heads // inputs["B"].shape[1])
        step = inputs["dt"][b, h, d] + inputs["dt_bias"][h, d]
        if inputs["dt_softplus"]:
            step = torch.log1p(torch.exp(step))
        x = inputs["x"][b, h, d]
        y = inputs["D"][h, d] * x
        for n in range(inputs["A"].shape[2]):
            state = torch.exp(step * inputs["A"][h, d, n]) * inputs["state"][b, h, d, n]
            state = state + step * x * inputs["B"][b, group, n]
            torch.testing.assert_close(new_state[b, h, d, n], state)
            y = y + state * inputs["C"][b, group, n]
        if "z" in inputs:
            z = inputs["z"][b, h, d]
            y = y * z / (1 + torch.exp(-z))
        torch.testing.assert_close(out[b, h, d], y)
        if out.numel() > 1000:
            break  # a loop in Python: of large cases the first channel


@pytest.mark.parametrize("gated", [False, True])
def test_steps_are_those_of_the_scan_and_change_the_state_in_place(gated: bool) -> None:
    torch.manual_seed(0)
    u, delta, z = (torch.randn(2, 6, 5, dtype=torch.float64) for _ in range(3))
    A, (B, C) = -torch.rand(6, 4).double(), torch.randn(2, 2, 4, 5, dtype=torch.float64)
    D, bias = torch.randn(2, 6, dtype=torch.float64)
    expected, last = selective_scan(
        u, delta, A, B, C, D, z if gated else None, bias, True, return_last_state=True
    )
    state = torch.zeros(2, 6, 4, dtype=torch.float64)
    for t in range(5):
        inputs = (u[..., t], delta[..., t], A, B[..., t], C[..., t], D)
        out = selective_state_update(state, *inputs, z[..., t] if gated else None, bias, True)
        torch.testing.assert_close(out, expected[..., t], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state, last, rtol=1e-12, atol=1e-12)


def test_as_mamba_2_calls_it() -> None:
    """Heads, and parameters of each head expanded over its channels, in the model's dtype."""
    torch.manual_seed(0)
    b, h, d, n, g = 2, 4, 16, 32, 2
    state, x, z = torch.randn(b, h, d, n), torch.randn(b, h, d), torch.randn(b, h, d)
    dt, A = torch.randn(b, h), -torch.rand(h)
    (B, C), (D, bias) = torch.randn(2, b, g, n), torch.randn(2, h).bfloat16()
    step = torch.nn.functional.softplus(dt + bias)
    B_, C_ = (t.repeat_interleave(h // g, dim=1) for t in (B, C))
    decay = torch.exp(step * A)[..., None, None]
    new_state = state * decay + step[..., None, None] * x[..., None] * B_[:, :, None]
    y = (new_state * C_[:, :, None]).sum(-1) + D[:, None] * x

    def wide(t: Tensor) -> Tensor:
        return t[..., None].expand(*t.shape, d)

    A_ = A[:, None, None].expand(h, d, n)
    out = selective_state_update(state, x, wide(dt), A_, B, C, wide(D), z, wide(bias), True)
    torch.testing.assert_close(state, new_state)
    torch.testing.assert_close(out, y * torch.nn.functional.silu(z))


def test_as_transformers_computes_it() -> None:
    """Its pure-torch path, which computes in float32."""
    modeling = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    *inputs, _ = CASE["mamba_2"].make(torch.float32, 4).values()
    state, x, dt, A, B, C, D, z, bias = inputs
    expected_state = state.clone()
    options = {"z": z, "dt_bias": bias, "dt_softplus": True}
    expected = modeling.mamba2_selective_state_update(expected_state, x, dt, A, B, C, D, **options)
    got = selective_state_update(state, x, dt, A, B, C, D, **options)
    torch.testing.assert_close(state, expected_state)
    torch.testing.assert_close(got, expected)


@on_each
def test_opcheck_and_strides_of_fake_kernel_and_reference(case: Case) -> None:
    operator, inputs = SPEC.operator(case.operator), case.make(torch.float32, 0)
    overload = getattr(torch.ops.fuseport, operator.name).default
    assert str(overload._schema) == operator.qualified_name + operator.schema
    if case.name in OPCHECKED:
        torch.library.opcheck(overload, tuple(inputs.values()))
    with FakeTensorMode() as mode:
        fakes = operator(
            *(mode.from_tensor(v) if isinstance(v, Tensor) else v for v in inputs.values())
        )
    real, plain = operator(*inputs.values()), operator.reference(*inputs.values())
    for a, b, c in zip(fakes, real, plain, strict=True):
        assert a.shape == b.shape == c.shape
        assert a.stride() == b.stride() == c.stride()


def test_it_refuses_to_be_differentiated() -> None:
    inputs = CASE["plain"].make(torch.float64, 0)
    inputs["x"].requires_grad_()
    out, _ = SPEC.operator("selective_state_update")(*inputs.values())
    message = "derivative for fuseport::selective_state_update is not implemented"
    with pytest.raises(RuntimeError, match=message):
        out.sum().backward()


BAD: dict[str, Callable[[Inputs], dict[str, Tensor]]] = {
    "x is 2-D": lambda x: {"x": x["x"][0]},
    "x is of integers": lambda x: {"x": x["x"].long()},
    "state is float64": lambda x: {"state": x["state"].double()},
    "state is half": lambda x: {"state": x["state"].half()},
    "state is 3-D": lambda x: {"state": x["state"][0]},
    "state is of another batch": lambda x: {"state": x["state"][:1]},
    "dt is 2-D": lambda x: {"dt": x["dt"][0]},
    "dt is float64": lambda x: {"dt": x["dt"].double()},
    "A is 2-D": lambda x: {"A": x["A"][0]},
    "A is half": lambda x: {"A": x["A"].half()},
    "B is 2-D": lambda x: {"B": x["B"][0]},
    "B has no groups": lambda x: {"B": x["B"][:, :0]},
    "B has 4 groups": lambda x: {"B": x["B"].expand(-1, 4, -1)},
    "B has other states": lambda x: {"B": x["B"][..., 1:]},
    "C has 3 groups": lambda x: {"C": x["C"].expand(-1, 3, -1)},
    "C is on another device": lambda x: {"C": x["C"].to("meta")},
    "D is 1-D": lambda x: {"D": x["D"][0]},
    "z is shorter": lambda x: {"z": x["z"][..., 1:]},
    "bias is bool": lambda x: {"dt_bias": x["dt_bias"] > 0},
}


@pytest.mark.parametrize("what", BAD)
def test_bad_inputs_are_refused_alike_by_kernel_reference_and_fake(what: str) -> None:
    operator = SPEC.operator("selective_state_update_gated")
    good = CASE["gated"].make(torch.float32, 0)
    (changed,) = BAD[what](good)
    inputs = {**good, **BAD[what](good)}
    messages = []
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(v) if isinstance(v, Tensor) else v for v in inputs.values()]
        with pytest.raises(ValueError, match="must be") as caught:
            operator(*fakes)
        messages.append(str(caught.value))
    for run in (operator, operator.reference):
        with pytest.raises(ValueError, match="must be") as caught:
            run(*inputs.values())
        messages.append(str(caught.value))
    assert messages[0].startswith(f"fuseport::{operator.name}: {changed} must be ")
    assert len(set(messages)) == 1


@on_dtypes
def test_bits_do_not_depend_on_threads(dtype: torch.dtype) -> None:
    inputs = CASE["many_units"].make(dtype, 8)
    operator, before = SPEC.operator(CASE["many_units"].operator), torch.get_num_threads()
    try:
        runs = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            runs.append(operator(*inputs.values()))
    finally:
        torch.set_num_threads(before)
    for run in runs[1:]:
        assert all(map(torch.equal, run, runs[0]))


LESSER_ISA = """
import torch
from fuseport.ops import OPS, register
assert register("selective_state_update")["selective_state_update"] == "native"
spec = OPS["selective_state_update"]
for case in spec.cases:
    for dtype in case.dtypes:
        inputs = case.make(dtype, 0)
        operator = spec.operator(case.operator)
        for got, wanted in zip(operator(*inputs.values()), operator.reference(*inputs.values())):
            tolerance = 40 * torch.finfo(dtype).eps
            torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)
"""


@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_lesser_instruction_sets_compute_the_same(isa: str, run_python: Run) -> None:
    done = run_python(LESSER_ISA, FUSEPORT_ISA=isa)
    assert done.returncode == 0, done.stderr


# ONNX.


@cache
def model_of(name: str, dtypes: tuple[torch.dtype, ...], softplus: int, body: bool) -> bytes:
    function = next(f for f in LOWERING.functions(20) if f.name == name)
    node = helper.make_node(
        name, function.input, function.output, domain=LOWERING.DOMAIN, dt_softplus=softplus
    )
    typed = dict(zip(function.input, dtypes, strict=True))
    results = {"out": typed["x"], "new_state": typed["state"]}
    inputs, outputs = (
        [
            helper.make_tensor_value_info(n, TYPES[t], [None] * RANKS.get(n, 3))
            for n, t in values.items()
        ]
        for values in (typed, results)
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(LOWERING.DOMAIN, LOWERING.VERSION)]
    model = helper.make_model(
        helper.make_graph([node], "g", inputs, outputs),
        functions=[function] if body else [],
        opset_imports=opsets,
        ir_version=10,
    )
    if body:
        onnx.checker.check_model(model)
    data: bytes = model.SerializeToString()
    return data


def in_onnxruntime(model: bytes, feed: dict[str, Tensor], library: bool, threads: int = 1) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    if library:
        options.register_custom_ops_library(str(onnxruntime_library()))
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    values = {name: to_value(t) for name, t in feed.items()}
    results = session.run_with_ort_values(["out", "new_state"], values)
    return [from_value(result) for result in results]


def lowered(
    monkeypatch: pytest.MonkeyPatch, case: Case, inputs: Inputs
) -> tuple[str, dict[str, Tensor], int]:
    """The node that a case becomes: its name, its inputs by name, dt_softplus."""
    seen: list[Any] = []
    monkeypatch.setattr(torch.onnx.ops, "symbolic_multi_out", lambda *a, **k: seen.append(a) or ())
    LOWERING.decompositions()[case.operator](*inputs.values())
    [(name, given, attributes)] = seen
    names = SPEC.operator(case.operator).inputs[:-1]
    feed = {n: t.contiguous() for n, t in zip(names, given, strict=True)}
    return name.removeprefix("fuseport.ops::"), feed, attributes["dt_softplus"]


@pytest.mark.in_turn(
    SPEC.cases,
    [torch.float32, torch.float64, torch.float16],
    IN_ALL_DTYPES,
)
def test_function_bodies(monkeypatch: pytest.MonkeyPatch, case: Case, dtype: torch.dtype) -> None:
    inputs = case.make(dtype, 0)
    expected = SPEC.operator(case.operator).reference(*inputs.values())
    op, feed, softplus = lowered(monkeypatch, case, inputs)
    model = model_of(op, tuple(t.dtype for t in feed.values()), softplus, True)
    arrays = {n: t.numpy() for n, t in feed.items()}
    evaluated = ReferenceEvaluator(onnx.load_from_string(model)).run(None, arrays)
    tolerance = {torch.float64: 1e-13, torch.float32: 3e-6, torch.float16: 2e-3}[dtype]
    for results in (
        in_onnxruntime(model, feed, library=False),
        [torch.from_numpy(np.asarray(y)) for y in evaluated],
    ):
        for got, wanted in zip(results, expected, strict=True):
            assert got.dtype == wanted.dtype
            scale = max([1.0, *wanted.double().abs().flatten().tolist()])
            torch.testing.assert_close(got, wanted, rtol=0, atol=tolerance * scale)


@pytest.mark.in_turn(SPEC.cases, FLOATING, IN_ALL_DTYPES)
def test_bits_in_onnxruntime_are_torchs(
    monkeypatch: pytest.MonkeyPatch, fused_library: Path, case: Case, dtype: torch.dtype
) -> None:
    inputs = case.make(dtype, 0)
    expected = SPEC.operator(case.operator)(*inputs.values())
    op, feed, softplus = lowered(monkeypatch, case, inputs)
    model = model_of(op, tuple(t.dtype for t in feed.values()), softplus, False)
    for threads in (1, 2):
        for got, wanted in zip(in_onnxruntime(model, feed, True, threads), expected, strict=True):
            assert got.dtype == wanted.dtype
            assert torch.equal(got, wanted)


def test_bad_shapes_are_refused_in_onnxruntime(fused_library: Path) -> None:
    *tensors, softplus = CASE["gated"].make(torch.float32, 0).values()
    names = SPEC.operator("selective_state_update_gated").inputs[:-1]
    feed = dict(zip(names, tensors, strict=True))
    model = model_of(
        "selective_state_update_gated", tuple(t.dtype for t in tensors), int(softplus), False
    )
    for name in set(names) - {"x"}:  # whose shape is what the others' are held against
        wrong = feed | {name: torch.zeros([7] * feed[name].dim())}
        with pytest.raises(Exception, match=f"selective_state_update_gated: {name} must be"):
            in_onnxruntime(model, wrong, library=True)
