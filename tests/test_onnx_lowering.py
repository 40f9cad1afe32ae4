"""The scan's nodes as ONNX functions, run on the op's own cases, against its reference."""

import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from torch import Tensor

from fuseport.exporter.formats import OPSETS
from fuseport.ops import OPS
from fuseport.ops.spec import Case

SPEC = OPS["selective_scan"]
LOWERING = SPEC.lowering()
FORWARD = {case.name: case for case in SPEC.cases if case.lowers}
# ONNX Runtime's Scan runs no steps not at all.
EMPTY = pytest.mark.xfail(raises=onnxruntime.capi.onnxruntime_pybind11_state.Fail, strict=True)
CASES = [pytest.param(name, marks=EMPTY if name == "no_steps" else ()) for name in FORWARD]
# The evaluator walks through time in Python, and not at all over no steps.
SHORT = [
    name for name, case in FORWARD.items() if 0 < case.make(torch.float32, 0)["u"].numel() < 2000
]
TYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.float64: TensorProto.DOUBLE,
    torch.float16: TensorProto.FLOAT16,
}
# Of the largest value of a tensor: several summation orders apart, and one rounding to the dtype.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 3e-6, torch.float16: 2e-3}


def model_of(name: str, dtypes: Sequence[torch.dtype], attributes: Any, opset: int) -> bytes:
    """One node of the op, with its function, between inputs and outputs of any shape."""
    function = next(f for f in LOWERING.functions(opset) if f.name == name)
    typed = zip(function.input, dtypes, strict=True)
    wide = torch.float64 if torch.float64 in dtypes else torch.float32
    gradients = {f"d{n}": t for n, t in zip(function.input, dtypes, strict=True)}
    results = {n: gradients.get(n, dtypes[0] if n == "out" else wide) for n in function.output}
    graph = helper.make_graph(
        [
            helper.make_node(
                name, function.input, function.output, domain=LOWERING.DOMAIN, **attributes
            )
        ],
        name,
        [helper.make_tensor_value_info(n, TYPES[t], shape_of(n)) for n, t in typed],
        [helper.make_tensor_value_info(n, TYPES[t], shape_of(n)) for n, t in results.items()],
    )
    imports = [
        helper.make_opsetid("", opset),
        helper.make_opsetid(LOWERING.DOMAIN, LOWERING.VERSION),
    ]
    model = helper.make_model(graph, functions=[function], opset_imports=imports, ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    return model.SerializeToString()


def shape_of(name: str) -> list[None]:
    """As many sizes as an input, or the gradient of one, has; none of them given."""
    name = name.removeprefix("d") if name not in ("delta", "delta_bias") else name
    return [None] * {"A": 2, "B": 4, "C": 4, "D": 1, "delta_bias": 1}.get(name, 3)


Run = Callable[[dict[str, np.ndarray]], list[np.ndarray]]


@cache
def in_onnxruntime(name: str, dtypes: tuple[torch.dtype, ...], softplus: int, opset: int) -> Run:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    model = model_of(name, dtypes, {"delta_softplus": softplus}, opset)
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return lambda feed: session.run(None, feed)


@cache
def in_evaluator(name: str, dtypes: tuple[torch.dtype, ...], softplus: int, opset: int) -> Run:
    model = onnx.load_from_string(model_of(name, dtypes, {"delta_softplus": softplus}, opset))
    evaluator = ReferenceEvaluator(model)
    return lambda feed: evaluator.run(None, feed)


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs an operator as its ONNX decomposition says, each symbolic node in a runtime."""

    def run(runtime: Callable[..., Run], operator: str, inputs: Sequence[Any], opset: int) -> Any:
        def node(
            qualified: str, given: Sequence[Tensor], attributes: dict[str, int], **_: Any
        ) -> list[Tensor]:
            name = qualified.removeprefix(f"{LOWERING.DOMAIN}::")
            dtypes = tuple(t.dtype for t in given)
            names = next(f for f in LOWERING.functions(opset) if f.name == name).input
            feed = {n: t.numpy() for n, t in zip(names, given, strict=True)}
            outputs = runtime(name, dtypes, attributes["delta_softplus"], opset)(feed)
            return [torch.from_numpy(np.asarray(o)) for o in outputs]

        monkeypatch.setattr(torch.onnx.ops, "symbolic_multi_out", node)
        return LOWERING.decompositions()[operator](*inputs)

    return run


def check(lowered: Any, runtime: Any, case: Case, dtype: torch.dtype, opset: int = 20) -> None:
    """Outputs and gradients of a case, in the runtime and by the reference."""
    forward = SPEC.operator(case.operator)
    inputs = case.make(dtype, 0)
    expected = forward.reference(*inputs.values())
    outputs = lowered(runtime, forward.name, list(inputs.values()), opset)
    compare(forward.outputs[:2], outputs[:2], expected[:2])  # the third are torch's chunk states

    generator = torch.Generator().manual_seed(1)
    cotangents = {
        f"d{name}": torch.randn(value.shape, generator=generator).to(value.dtype)
        for name, value in zip(forward.outputs[:2], expected[:2], strict=True)
    }
    backward = SPEC.operator(forward.backward or "")
    values = list(SPEC.backward_inputs(forward, inputs, cotangents).values())
    gradients = lowered(runtime, backward.name, values, opset)
    compare(backward.outputs, gradients, backward.reference(*values))


def compare(names: Sequence[str], got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for name, value, truth in zip(names, got, expected, strict=True):
        assert value.dtype == truth.dtype, name
        assert value.shape == truth.shape, name
        if truth.numel():
            error = (value.double() - truth.double()).abs().max()
            assert error <= TOLERANCE[truth.dtype] * truth.double().abs().max().clamp(min=1), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_function_bodies_in_onnxruntime(lowered: Any, name: str, dtype: torch.dtype) -> None:
    check(lowered, in_onnxruntime, FORWARD[name], dtype)


def test_a_body_runs_on_none_of_a_batch_where_the_weights_sizes_are_known(
    lowered: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From which ONNX Runtime's optimizer concludes those that are left, -1, of any number but 0:
    experts of a mixture may get no sequence."""
    case = FORWARD["empty_batch"]
    given = case.make(torch.float32, 0)
    d, n = given["A"].shape
    known: dict[str, list[int | None]] = {
        **{key: [None, d, None] for key in ("u", "delta", "dout", "out", "z", "dz")},
        **{key: [None, given["B"].shape[1], n, None] for key in ("B", "C")},
        **{"A": [d, n], "D": [d], "delta_bias": [d], "last_state": [None, d, n]},
    }
    known |= {f"d{name}": sizes for name, sizes in known.items()}
    monkeypatch.setattr(sys.modules[__name__], "shape_of", known.__getitem__)
    check(lowered, in_onnxruntime.__wrapped__, case, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", SHORT)
def test_function_bodies_in_onnx_own_evaluator(lowered: Any, name: str, dtype: torch.dtype) -> None:
    check(lowered, in_evaluator, FORWARD[name], dtype)


@pytest.mark.parametrize("opset", OPSETS)
def test_every_opset_has_bodies(lowered: Any, opset: int) -> None:
    for name in ("plain", "gated_without_softplus"):
        check(lowered, in_onnxruntime, FORWARD[name], torch.float32, opset)
        check(lowered, in_evaluator, FORWARD[name], torch.float32, opset)


def test_there_is_a_body_for_every_operator() -> None:
    operators = {operator.name for operator in SPEC.operators}
    assert set(LOWERING.decompositions()) == operators
    assert {function.name for function in LOWERING.functions(18)} == operators


@pytest.mark.parametrize("case", [c for c in SPEC.cases if not c.lowers], ids=lambda c: c.name)
def test_cases_without_a_form_in_onnx_are_refused(lowered: Any, case: Case) -> None:
    forward = SPEC.operator(case.operator)
    inputs = case.make(torch.float32, 0)
    out, last_state, _ = forward.fake(*inputs.values())
    cotangents = {"dout": torch.ones_like(out), "dlast_state": torch.ones_like(last_state)}
    gradient_inputs = SPEC.backward_inputs(forward, inputs, cotangents)
    for name, values in ((forward.name, inputs), (forward.backward or "", gradient_inputs)):
        with pytest.raises(ValueError, match="complex A has no form in ONNX"):
            lowered(in_evaluator, name, list(values.values()), 20)


def test_small_steps_keep_their_relative_accuracy(lowered: Any) -> None:
    """Softplus of -30 is 1e-13: log(1 + exp(x)) as written would round it to 0."""
    inputs = FORWARD["plain"].make(torch.float32, 0) | {"delta": torch.full((2, 6, 9), -30.0)}
    inputs["D"] = torch.zeros(6)
    expected, *_ = SPEC.operator("selective_scan").reference(*inputs.values())
    out, *_ = lowered(in_onnxruntime, "selective_scan", list(inputs.values()), 20)
    assert torch.allclose(out, expected, rtol=1e-5, atol=0)
