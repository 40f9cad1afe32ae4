"""The causal convolution in ONNX: function bodies, and kernels with torch's bits."""

from collections.abc import Callable, Sequence
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
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument
from torch import Tensor

from fuseport.exporter.formats import OPSETS
from fuseport.exporter.runtimes._onnxruntime import from_value, to_value
from fuseport.ops import OPS, onnxruntime_library, register
from fuseport.ops.spec import FLOATING, Case

SPEC = OPS["causal_conv1d"]
LOWERING = SPEC.lowering()
CASE = {case.name: case for case in SPEC.cases}
IN_ALL_DTYPES = ("plain", "last_plain", "packed", "wide_weight", "packed_wide_weight")
TYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.float64: TensorProto.DOUBLE,
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.int32: TensorProto.INT32,
}
RANKS = {"weight": 2, "bias": 1, "seq_idx": 2}
# Of the largest value of a tensor: several summation orders apart, and one rounding to the dtype.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 3e-6, torch.float16: 2e-3}
Node = tuple[str, tuple[torch.dtype, ...], int]
Run = Callable[[Sequence[Tensor]], list[Tensor]]


def model_of(node: Node, opset: int, body: bool) -> bytes:
    """One node of the op, with or without its body, between inputs and outputs of any shape."""
    name, dtypes, silu = node
    function = next(f for f in LOWERING.functions(opset) if f.name == name)
    given = dict(zip(function.input, dtypes, strict=True))
    of_gradients = {f"d{n}": t for n, t in given.items()}
    x_dtype = given["x"]
    results = {n: of_gradients.get(n, x_dtype) for n in function.output}

    def value(tensor: str, dtype: torch.dtype) -> Any:
        rank = RANKS.get(tensor, RANKS.get(tensor.removeprefix("d"), 3))
        return helper.make_tensor_value_info(tensor, TYPES[dtype], [None] * rank)

    domain = LOWERING.DOMAIN
    graph = helper.make_graph(
        [helper.make_node(name, function.input, function.output, domain=domain, silu=silu)],
        name,
        [value(n, t) for n, t in given.items()],
        [value(n, t) for n, t in results.items()],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid(domain, LOWERING.VERSION)]
    functions = [function] if body else []
    model = helper.make_model(graph, functions=functions, opset_imports=opsets, ir_version=10)
    if body:
        onnx.checker.check_model(model, full_check=True)
    return model.SerializeToString()


@cache
def in_onnxruntime(node: Node, opset: int) -> Run:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    model = model_of(node, opset, True)
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names = [i.name for i in session.get_inputs()]
    return lambda given: [
        torch.from_numpy(np.asarray(y))
        for y in session.run(None, {n: t.numpy() for n, t in zip(names, given, strict=True)})
    ]


@cache
def in_evaluator(node: Node, opset: int) -> Run:
    evaluator = ReferenceEvaluator(onnx.load_from_string(model_of(node, opset, True)))
    names = evaluator.input_names
    return lambda given: [
        torch.from_numpy(np.array(y))
        for y in evaluator.run(None, {n: t.numpy() for n, t in zip(names, given, strict=True)})
    ]


@cache
def fused(node: Node, opset: int, threads: int = 1) -> Run:
    """Nodes have no bodies here: nothing but a kernel of the library can run them."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    options.register_custom_ops_library(str(onnxruntime_library()))
    session = onnxruntime.InferenceSession(
        model_of(node, opset, False), options, providers=["CPUExecutionProvider"]
    )
    names = [i.name for i in session.get_inputs()]
    outputs = [o.name for o in session.get_outputs()]
    return lambda given: [
        from_value(y)
        for y in session.run_with_ort_values(
            outputs, {n: to_value(t) for n, t in zip(names, given, strict=True)}
        )
    ]


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs an operator as its ONNX decomposition says, each symbolic node in a runtime."""

    def run(runtime: Callable[..., Run], operator: str, inputs: Sequence[Any], opset: int) -> Any:
        def node(name: str, given: Sequence[Tensor], attributes: Any, **rest: Any) -> list[Tensor]:
            plain = name.removeprefix(f"{LOWERING.DOMAIN}::")
            key = (plain, tuple(t.dtype for t in given), attributes["silu"])
            outputs = runtime(key, opset)([t.contiguous() for t in given])
            declared = zip(outputs, rest["shapes"], rest["dtypes"], strict=True)
            for output, shape, dtype in declared:
                assert output.shape == torch.Size(shape)
                assert output.dtype == dtype
            return outputs

        monkeypatch.setattr(torch.onnx.ops, "symbolic_multi_out", node)
        return LOWERING.decompositions()[operator](*inputs)

    return run


def both(name: str, dtype: torch.dtype) -> list[tuple[Any, list[Any]]]:
    """A case's forward and backward operators, each with its inputs."""
    forward = SPEC.operator(CASE[name].operator)
    inputs = CASE[name].make(dtype, 0)
    generator = torch.Generator().manual_seed(1)
    cotangents = {
        f"d{n}": torch.randn(y.shape, generator=generator).to(y.dtype)
        for n, y in zip(forward.outputs, forward.fake(*inputs.values()), strict=True)
    }
    values = SPEC.backward_inputs(forward, inputs, cotangents)
    backward = SPEC.operator(forward.backward or "")
    return [(forward, list(inputs.values())), (backward, list(values.values()))]


def check(lowered: Any, runtime: Any, name: str, dtype: torch.dtype, opset: int = 20) -> None:
    for operator, inputs in both(name, dtype):
        got = lowered(runtime, operator.name, inputs, opset)
        for output, value, truth in zip(
            operator.outputs, got, operator.reference(*inputs), strict=True
        ):
            assert value.dtype == truth.dtype, output
            assert value.shape == truth.shape, output
            if truth.numel():
                error = (value.double() - truth.double()).abs().max()
                scale = truth.double().abs().max().clamp(min=1)
                assert error <= TOLERANCE[truth.dtype] * scale, output


@pytest.mark.in_turn(SPEC.cases, [torch.float32, torch.float64, torch.float16], IN_ALL_DTYPES)
def test_function_bodies_in_onnxruntime(lowered: Any, case: Case, dtype: torch.dtype) -> None:
    check(lowered, in_onnxruntime, case.name, dtype)


@pytest.mark.in_turn(SPEC.cases, [torch.float64, torch.float32], IN_ALL_DTYPES)
def test_function_bodies_in_onnx_own_evaluator(
    lowered: Any, case: Case, dtype: torch.dtype
) -> None:
    check(lowered, in_evaluator, case.name, dtype)


@pytest.mark.parametrize("opset", OPSETS)
def test_every_opset_has_bodies(lowered: Any, opset: int) -> None:
    for name in ("plain", "without_silu", "packed"):
        check(lowered, in_onnxruntime, name, torch.float32, opset)
        check(lowered, in_evaluator, name, torch.float32, opset)


def test_there_is_a_body_for_every_operator() -> None:
    operators = {operator.name for operator in SPEC.operators}
    assert set(LOWERING.decompositions()) == operators
    assert {function.name for function in LOWERING.functions(18)} == operators


@pytest.mark.in_turn(SPEC.cases, FLOATING, IN_ALL_DTYPES)
def test_bits_are_torchs_on_one_thread_and_on_two(
    lowered: Any, fused_library: Path, case: Case, dtype: torch.dtype
) -> None:
    assert register(SPEC.name) == {SPEC.name: "native"}
    for operator, inputs in both(case.name, dtype):
        given = [t.contiguous() if isinstance(t, Tensor) else t for t in inputs]
        expected = operator(*given)
        for threads in (1, 2):

            def runtime(node: Node, opset: int, threads: int = threads) -> Run:
                return fused(node, opset, threads)

            got = lowered(runtime, operator.name, given, 20)
            for output, value, truth in zip(operator.outputs, got, expected, strict=True):
                assert value.dtype == truth.dtype, output
                np.testing.assert_array_equal(value.double().numpy(), truth.double().numpy())


WRONG = {
    "weight": ((5, 4), r"weight must be \(d, W\) = \(6, 4\); got \(5, 4\)"),
    "bias": ((7,), r"bias must be \(d,\) = \(6,\); got \(7,\)"),
    "initial_states": ((2, 6, 4), r"initial_states must be .* = \(2, 6, 3\); got \(2, 6, 4\)"),
    "dout": ((2, 6, 1), "dout must be x's shape"),
    "dfinal_states": ((2, 6, 4), "dfinal_states must be"),
}


@pytest.mark.parametrize("name", WRONG)
def test_shapes_that_do_not_fit_are_refused_by_name(fused_library: Path, name: str) -> None:
    shape, message = WRONG[name]
    for operator, inputs in both("plain", torch.float32):
        if name not in operator.inputs:
            continue
        tensors = dict(zip(operator.inputs, inputs[:-1], strict=False))
        node = (operator.name, (torch.float32,) * len(tensors), 1)
        with pytest.raises(InvalidArgument, match=f"fuseport.ops::{operator.name}: {message}"):
            fused(node, 20)([*(tensors | {name: torch.zeros(shape)}).values()])


@pytest.mark.parametrize("sizes", [(2**40, 0, 2**10), (0, 1, 2**59)])
def test_sizes_that_no_memory_holds_do_no_harm_where_nothing_is(
    fused_library: Path, sizes: tuple[int, int, int]
) -> None:
    b, d, l = sizes  # noqa: E741
    shapes = [(b, d, l), (d, 4), (d,), (b, d, 3)]
    tensors = [torch.ones(shape) for shape in shapes]
    out, final_states = fused(("causal_conv1d", (torch.float32,) * 4, 1), 20)(tensors)
    assert out.shape == (b, d, l)
    assert final_states.shape == (b, d, 3)
    cotangents = [torch.ones(b, d, l), torch.ones(b, d, 3)]
    backward = fused(("causal_conv1d_backward", (torch.float32,) * 6, 1), 20)
    gradients = backward([*cotangents, *tensors])
    assert [g.shape for g in gradients] == [t.shape for t in tensors]
    assert not any(g.any() for g in gradients)
