"""The chunked scan is a good citizen of torch and of ONNX: fakes, errors, export, bodies, bits."""

import re
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
from fuseport.ops.spec import FLOATING, Case, Inputs, Operator, OpSpec
from fuseport.ops.ssd_chunk_scan import shapes, ssd_chunk_scan
from fuseport.tests.ops.faint_states import error_of_gradient, faint

SPEC = OPS["ssd_chunk_scan"]
CASE = {case.name: case for case in SPEC.cases}
IN_ALL_DTYPES = ("gated", "mamba_2", "packed", "discrete_mamba_3", "discrete_packed")
LOWERING = SPEC.lowering()
TYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.float64: TensorProto.DOUBLE,
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.int32: TensorProto.INT32,
}
RANKS = {"dt": 3, "A": 1, "log_decay": 3, "D": 2, "dt_bias": 1, "seq_idx": 2, "dt_limit": 1}
RANKS |= {f"d{name}": rank for name, rank in RANKS.items()}
# What tracing and dynamic shapes can tell apart; the others differ in sizes and values alone.
OPCHECKED = (
    *("plain", "gated", "length_1", "no_steps", "empty_batch", "groups", "packed"),
    *("layout_transposed", "layout_expanded_time", "layout_packed_transposed"),
    *("discrete", "discrete_no_steps", "discrete_packed", "layout_discrete_expanded"),
)
on_each = pytest.mark.parametrize("case", SPEC.cases, ids=lambda c: c.name)


@pytest.fixture(scope="module", autouse=True)
def spec() -> OpSpec:
    """The op, registered from its native library."""
    assert register(SPEC.name)[SPEC.name] == "native"
    return SPEC


def both(case: Case, dtype: torch.dtype) -> list[tuple[Operator, Inputs]]:
    """The operator of a case and the one of its gradients, each with inputs."""
    operator, inputs = SPEC.operator(case.operator), case.make(dtype, 0)
    generator = torch.Generator().manual_seed(1)
    cotangents = {
        f"d{name}": torch.randn(y.shape, generator=generator).to(y.dtype)
        for name, y in zip(operator.outputs, operator.fake(*inputs.values()), strict=True)
    }
    gradient_inputs = SPEC.backward_inputs(operator, inputs, cotangents)
    return [(operator, inputs), (SPEC.operator(operator.backward or ""), gradient_inputs)]


@pytest.mark.parametrize("name", OPCHECKED)
def test_opcheck(name: str) -> None:
    for operator, inputs in both(CASE[name], torch.float32):
        overload = getattr(torch.ops.fuseport, operator.name).default
        assert str(overload._schema) == operator.qualified_name + operator.schema
        if operator.backward:  # the other operator's inputs require no gradients
            inputs = {
                name: v.detach().requires_grad_(v.is_floating_point() and name != "dt_limit")
                if isinstance(v, Tensor)
                else v
                for name, v in inputs.items()
            }
        torch.library.opcheck(overload, tuple(inputs.values()))


@on_each
def test_strides_of_fake_kernel_and_reference(case: Case) -> None:
    for operator, inputs in both(case, torch.bfloat16):
        with FakeTensorMode() as mode:
            fakes = operator(
                *(mode.from_tensor(v) if isinstance(v, Tensor) else v for v in inputs.values())
            )
        results = operator(*inputs.values()), operator.reference(*inputs.values())
        for fake, real, plain in zip(fakes, *results, strict=True):
            assert fake.shape == real.shape == plain.shape
            assert fake.stride() == real.stride() == plain.stride()
            assert fake.dtype == real.dtype == plain.dtype


@pytest.mark.parametrize("seed", range(4))
def test_the_gradient_of_a_is_exact_where_states_hardly_matter(seed: int) -> None:
    inputs, cotangents = faint(torch.float32, seed)
    backward = torch.ops.fuseport.ssd_chunk_scan_backward
    found = backward(*cotangents.values(), *inputs.values())[2]
    assert error_of_gradient(found, inputs, cotangents) < 2e-6


def test_python_and_native_agree_on_the_chunk_and_the_least_decay() -> None:
    text = (SPEC.folder / "kernel.hpp").read_text()
    (chunk,) = re.findall(r"CHUNK = (\d+);", text)
    assert int(chunk) == shapes.CHUNK
    (least,) = re.findall(r"LEAST_LOG_DECAY = (\S+);", text)
    assert float(least) == shapes.LEAST_LOG_DECAY


def test_gradients_of_gradients_are_refused() -> None:
    inputs = CASE["gated"].make(torch.float64, 0)
    x = inputs["x"].requires_grad_()
    out, _ = SPEC.operator("ssd_chunk_scan_gated")(*inputs.values())
    (dx,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(
        RuntimeError, match="derivative for fuseport::ssd_chunk_scan_gated_backward"
    ):
        torch.autograd.grad(dx.sum(), x)


BAD: dict[str, Callable[[Inputs], dict[str, Tensor]]] = {
    "x is 3-D": lambda x: {"x": x["x"][0]},
    "x is of integers": lambda x: {"x": x["x"].long()},
    "dt is longer": lambda x: {"dt": torch.cat([x["dt"], x["dt"]], 1)},
    "dt is float64": lambda x: {"dt": x["dt"].double()},
    "A is 2-D": lambda x: {"A": x["A"][None]},
    "A is half": lambda x: {"A": x["A"].half()},
    "B is 3-D": lambda x: {"B": x["B"][0]},
    "B has no groups": lambda x: {"B": x["B"][:, :, :0]},
    "B has 2 groups": lambda x: {"B": x["B"].expand(-1, -1, 2, -1)},
    "B is shorter": lambda x: {"B": x["B"][:, 1:]},
    "C has other states": lambda x: {"C": x["C"][..., 1:]},
    "C is on another device": lambda x: {"C": x["C"].to("meta")},
    "D is 1-D": lambda x: {"D": x["D"][:, 0]},
    "z is half": lambda x: {"z": x["z"].half()},
    "bias is bool": lambda x: {"dt_bias": x["dt_bias"] > 0},
    "initial_states are of another batch": lambda x: {"initial_states": x["initial_states"][:1]},
    "seq_idx is of int64": lambda x: {"seq_idx": x["seq_idx"].long()},
    "seq_idx is floating": lambda x: {"seq_idx": x["seq_idx"].float()},
    "seq_idx is shorter": lambda x: {"seq_idx": x["seq_idx"][:, 1:]},
    "seq_idx is of one sequence": lambda x: {"seq_idx": x["seq_idx"][0]},
    "dt_limit has one": lambda x: {"dt_limit": x["dt_limit"][:1]},
}
BAD_GRADIENTS: dict[str, Callable[[Inputs], dict[str, Tensor]]] = {
    "dout is shorter": lambda x: {"dout": x["dout"][:, 1:]},
    "dout is float64": lambda x: {"dout": x["dout"].double()},
    "dfinal_states is 3-D": lambda x: {"dfinal_states": x["dfinal_states"][0]},
}


BAD_DISCRETE: dict[str, Callable[[Inputs], dict[str, Tensor]]] = {
    "log_decay is half": lambda x: {"log_decay": x["log_decay"].half()},
    "log_decay is longer": lambda x: {"log_decay": torch.cat([x["log_decay"]] * 2, 1)},
    **{
        what: wrong
        for what, wrong in {**BAD, **BAD_GRADIENTS}.items()
        if what.split()[0] not in ("dt", "A", "z", "bias", "dt_limit")
    },
}
WRONG = [
    *(("gated", what) for what in {**BAD, **BAD_GRADIENTS}),
    *(("discrete", what) for what in BAD_DISCRETE),
]


@pytest.mark.parametrize(("name", "what"), WRONG)
def test_bad_inputs_are_refused_alike_by_kernel_reference_and_fake(name: str, what: str) -> None:
    operator, good = both(CASE[name], torch.float32)[what in BAD_GRADIENTS]
    change = {**BAD, **BAD_DISCRETE, **BAD_GRADIENTS}[what](good)
    inputs = {**good, **change}
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
    (changed,) = change
    assert messages[0].startswith(f"fuseport::{operator.name}: {changed} must be ")
    assert len(set(messages)) == 1


def test_export_keeps_batch_and_length_open_and_gradients_are_compiled() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.A_log, self.D = (torch.nn.Parameter(torch.rand(3)) for _ in range(2))
            self.project = torch.nn.Linear(6, 12 + 3 + 2 * 4)

        def forward(self, u: Tensor) -> Tensor:
            x, dt, B, C = self.project(u).split([12, 3, 4, 4], dim=-1)
            B, C = B.unsqueeze(2), C.unsqueeze(2)
            A = -self.A_log.exp()
            return ssd_chunk_scan(x.unflatten(2, (3, 4)), dt, A, B, C, D=self.D, dt_softplus=True)

    model = Block()
    dims = {0: torch.export.Dim("b", min=1), 1: torch.export.Dim("l", min=1)}
    program = torch.export.export(model, (torch.randn(2, 9, 6),), dynamic_shapes=(dims,))
    compiled = torch.compile(model, backend="aot_eager", dynamic=True, fullgraph=True)
    for b, l in ((2, 9), (3, 65)):  # noqa: E741
        u = torch.randn(b, l, 6, requires_grad=True)
        torch.testing.assert_close(program.module()(u), model(u))
        wanted = [u, *model.parameters()]
        got = torch.autograd.grad(compiled(u).sin().sum(), wanted)
        torch.testing.assert_close(got, torch.autograd.grad(model(u).sin().sum(), wanted))


# ONNX.


@cache
def model_of(
    name: str,
    dtypes: tuple[torch.dtype, ...],
    attributes: tuple[tuple[str, int], ...],
    body: bool,
    opset: int = 20,
) -> bytes:
    function = next(f for f in LOWERING.functions(opset) if f.name == name)
    node = helper.make_node(
        name, function.input, function.output, domain=LOWERING.DOMAIN, **dict(attributes)
    )
    typed = dict(zip(function.input, dtypes, strict=True))
    results = {
        "out": typed["x"],
        "final_states": typed["D"],
        **{f"d{n}": t for n, t in typed.items()},
    }
    values = [
        [helper.make_tensor_value_info(n, TYPES[known[n]], [None] * RANKS.get(n, 4)) for n in names]
        for known, names in ((typed, function.input), (results, function.output))
    ]
    domain = helper.make_opsetid(LOWERING.DOMAIN, LOWERING.VERSION)
    model = helper.make_model(
        helper.make_graph([node], "g", *values),
        functions=[function] if body else [],
        opset_imports=[helper.make_opsetid("", opset), domain],
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
    names = [output.name for output in session.get_outputs()]
    values = {name: to_value(t) for name, t in feed.items()}
    return [from_value(y) for y in session.run_with_ort_values(names, values)]


def lowered(
    monkeypatch: pytest.MonkeyPatch, operator: Operator, inputs: Inputs
) -> tuple[str, dict[str, Tensor], tuple[tuple[str, int], ...]]:
    """The node that an operator becomes: its name, its inputs by name, its attributes."""
    seen: list[Any] = []
    monkeypatch.setattr(torch.onnx.ops, "symbolic_multi_out", lambda *a, **k: seen.append(a) or ())
    LOWERING.decompositions()[operator.name](*inputs.values())
    [(name, given, attributes)] = seen
    names = [n for n, v in inputs.items() if isinstance(v, Tensor)]
    feed = {n: t.contiguous() for n, t in zip(names, given, strict=True)}
    return name.removeprefix("fuseport.ops::"), feed, tuple(attributes.items())


def compare(got: Any, expected: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3}[dtype]
    for value, wanted in zip(got, expected, strict=True):
        assert value.dtype == wanted.dtype
        assert value.shape == wanted.shape
        if not wanted.numel():
            continue
        error = (value.double() - wanted.double()).abs().max()
        assert error <= tolerance * wanted.double().abs().max().clamp(min=1)


BODIES = [case for case in SPEC.cases if not case.name.endswith("no_steps")]
ONNX_OWN = (
    *("plain", "gated", "limited", "length_1", "groups", "packed"),
    *("discrete", "discrete_one_of_everything", "discrete_groups", "discrete_cut_off"),
)
BODY_DTYPES = (torch.float32, torch.float64, torch.float16)


@pytest.mark.in_turn(BODIES, BODY_DTYPES, IN_ALL_DTYPES)
def test_function_bodies_in_onnxruntime(
    monkeypatch: pytest.MonkeyPatch, case: Case, dtype: torch.dtype
) -> None:
    for operator, inputs in both(case, dtype):
        op, feed, attributes = lowered(monkeypatch, operator, inputs)
        model = model_of(op, tuple(t.dtype for t in feed.values()), attributes, True)
        wide = [
            v.double() if isinstance(v, Tensor) and v.is_floating_point() else v
            for v in inputs.values()
        ]
        plain = operator.reference(*inputs.values())
        truth = [y.to(p.dtype) for y, p in zip(operator.reference(*wide), plain, strict=True)]
        compare(in_onnxruntime(model, feed, library=False), tuple(truth), dtype)


@pytest.mark.parametrize("opset", [18, 23])
@pytest.mark.parametrize("name", ONNX_OWN)
def test_function_bodies_in_onnx_own_evaluator(
    monkeypatch: pytest.MonkeyPatch, name: str, opset: int
) -> None:
    for operator, inputs in both(CASE[name], torch.float64):
        op, feed, attributes = lowered(monkeypatch, operator, inputs)
        model = model_of(op, tuple(t.dtype for t in feed.values()), attributes, True, opset)
        evaluator = ReferenceEvaluator(onnx.load_from_string(model))
        results = evaluator.run(None, {n: t.numpy() for n, t in feed.items()})
        got = [torch.from_numpy(np.asarray(y)) for y in results]
        compare(got, operator.reference(*inputs.values()), torch.float64)


@pytest.mark.in_turn(SPEC.cases, FLOATING, IN_ALL_DTYPES)
def test_bits_in_onnxruntime_are_torchs(
    monkeypatch: pytest.MonkeyPatch, fused_library: Path, case: Case, dtype: torch.dtype
) -> None:
    for operator, inputs in both(case, dtype):
        op, feed, attributes = lowered(monkeypatch, operator, inputs)
        model = model_of(op, tuple(t.dtype for t in feed.values()), attributes, False)
        expected = operator(*inputs.values())
        for threads in (1, 2):
            got = in_onnxruntime(model, feed, True, threads)
            assert all(map(torch.equal, got, expected))
            assert [y.dtype for y in got] == [y.dtype for y in expected]


@pytest.mark.parametrize("name", ["gated", "discrete"])
def test_bad_shapes_are_refused_in_onnxruntime(fused_library: Path, name: str) -> None:
    for operator, inputs in both(CASE[name], torch.float32):
        feed = {n: t for n, t in inputs.items() if isinstance(t, Tensor)}
        attributes = tuple((n, int(v)) for n, v in inputs.items() if n not in feed)
        model = model_of(operator.name, tuple(t.dtype for t in feed.values()), attributes, False)
        for wrong in set(feed) - {"x", "B"}:  # whose shapes are what the others' are held against
            fed = feed | {wrong: feed[wrong].new_zeros([7] * feed[wrong].dim())}
            with pytest.raises(Exception, match=f"{operator.name}: {wrong} must be"):
                in_onnxruntime(model, fed, library=True)
