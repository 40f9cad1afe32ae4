"""The norms' nodes in ONNX: bodies against the references, fused kernels to torch's bits."""

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
from fuseport.ops.spec import Case

SPECS = {name: OPS[name] for name in ("rms_norm", "rms_norm_gated")}
# Not the memory layouts: the nodes' inputs are contiguous.
CASES = [
    case for spec in SPECS.values() for case in spec.cases if not case.name.startswith("layout")
]
IN_ALL_DTYPES = ("groups", "channels_17", "many_units", "large_eps", "weight_of_xs_dtype")
# ONNX Runtime's ReduceSum loses the shape of what is empty.
EMPTY = {"no_rows", "no_rows_in_the_middle", "no_channels"}
TYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.float64: TensorProto.DOUBLE,
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
}
# Of the largest value of a tensor: several summation orders apart, terms that cancel where a group
# is one channel, and one rounding to the dtype.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 2e-3}

Run = Callable[[Sequence[Tensor]], list[Tensor]]


@pytest.fixture(autouse=True)
def _native() -> None:
    assert set(register(*SPECS).values()) == {"native"}


def plain_name(case: Case) -> str:
    return case.name.removesuffix("_gate_before_norm")


def each(
    cases: Sequence[Case], common: Sequence[torch.dtype], rare: Sequence[torch.dtype]
) -> pytest.MarkDecorator:
    """All cases in the common dtypes, some of them in the rare ones."""
    some = [case for case in cases if plain_name(case) in IN_ALL_DTYPES]
    pairs = [(c, t) for t in common for c in cases] + [(c, t) for t in rare for c in some]
    ids = [f"{c.operator}-{c.name}-{t}" for c, t in pairs]
    return pytest.mark.parametrize(("case", "dtype"), pairs, ids=ids)


@cache
def model_of(
    name: str,
    dtypes: tuple[torch.dtype, ...],
    rank: int,
    attributes: tuple[tuple[str, Any], ...],
    opset: int,
    with_body: bool = True,
) -> bytes:
    """One node, with its function or without, between inputs and outputs of any sizes."""
    op = name.removesuffix("_backward")
    lowering = SPECS[op].lowering()
    [function] = [f for f in lowering.functions(opset) if f.name == name]
    typed = dict(zip(function.input, dtypes, strict=True))
    typed |= {f"d{n}": t for n, t in typed.items()} | {"out": dtypes[0]}

    def value(tensor: str) -> Any:
        sizes = [None] * (1 if "weight" in tensor else rank)
        return helper.make_tensor_value_info(tensor, TYPES[typed[tensor]], sizes)

    node = helper.make_node(
        name, function.input, function.output, domain=lowering.DOMAIN, **dict(attributes)
    )
    graph = helper.make_graph(
        [node], name, list(map(value, function.input)), list(map(value, function.output))
    )
    imports = [
        helper.make_opsetid("", opset),
        helper.make_opsetid(lowering.DOMAIN, lowering.VERSION),
    ]
    model = helper.make_model(
        graph,
        functions=[function] if with_body else [],
        opset_imports=imports,
        ir_version=10,
    )
    if with_body:
        onnx.checker.check_model(model, full_check=True)
    return model.SerializeToString()


@cache
def session(model: bytes, library: str | None, threads: int = 1) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    if library:
        options.register_custom_ops_library(library)
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def in_onnxruntime(name: str, inputs: Sequence[Tensor], attributes: Any, opset: int) -> Any:
    model = model_of(name, *described(inputs, attributes), opset)
    names = [i.name for i in session(model, None).get_inputs()]
    feed = {n: t.numpy() for n, t in zip(names, inputs, strict=True)}
    return [torch.from_numpy(y) for y in session(model, None).run(None, feed)]


def in_evaluator(name: str, inputs: Sequence[Tensor], attributes: Any, opset: int) -> Any:
    model = onnx.load_from_string(model_of(name, *described(inputs, attributes), opset))
    feed = {i.name: t.numpy() for i, t in zip(model.graph.input, inputs, strict=True)}
    results = ReferenceEvaluator(model).run(None, feed)
    return [torch.from_numpy(np.asarray(y)) for y in results]


def fused(name: str, inputs: Sequence[Tensor], attributes: Any, threads: int) -> list[Tensor]:
    """By the kernels: the node has no function body."""
    model = model_of(name, *described(inputs, attributes), 20, with_body=False)
    opened = session(model, str(onnxruntime_library()), threads)
    names = [i.name for i in opened.get_inputs()]
    outputs = [o.name for o in opened.get_outputs()]
    values = dict(zip(names, map(to_value, inputs), strict=True))
    return [from_value(y) for y in opened.run_with_ort_values(outputs, values)]


def described(inputs: Sequence[Tensor], attributes: Any) -> Any:
    """The dtypes, the rank of x, and the attributes of a node."""
    return tuple(t.dtype for t in inputs), inputs[0].dim(), tuple(attributes.items())


Lowered = Callable[..., Sequence[Tensor]]


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> Lowered:
    """Runs an operator as its ONNX decomposition says, each symbolic node by `run`."""

    def result(run: Any, operator: str, inputs: Sequence[Any], *rest: Any) -> Any:
        def node(qualified: str, given: Sequence[Tensor], attributes: Any, **_: Any) -> Any:
            name = qualified.removeprefix("fuseport.ops::")
            return run(name, [t.contiguous() for t in given], attributes, *rest)

        monkeypatch.setattr(torch.onnx.ops, "symbolic_multi_out", node)
        op = operator.removesuffix("_backward")
        return SPECS[op].lowering().decompositions()[operator](*inputs)

    return result


def both(case: Case, dtype: torch.dtype) -> list[tuple[str, list[Any], Sequence[str]]]:
    """Forward and backward of a case: operator, inputs, and names of the outputs that count."""
    spec = SPECS[case.operator]
    forward = spec.operator(case.operator)
    backward = spec.operator(forward.backward or "")
    inputs = case.make(dtype, 0)
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(inputs["x"].shape, generator=generator).to(dtype)
    saved = spec.backward_inputs(forward, inputs, {"dout": dout})
    return [
        (forward.name, list(inputs.values()), ["out"]),  # rstd is torch's alone
        (backward.name, list(saved.values()), backward.outputs),
    ]


def check(lowered: Lowered, run: Any, case: Case, dtype: torch.dtype, opset: int = 20) -> None:
    for operator, inputs, names in both(case, dtype):
        expected = SPECS[case.operator].operator(operator).reference(*inputs)
        got = lowered(run, operator, inputs, opset)
        for name, value, truth in zip(names, got, expected, strict=False):
            assert value.dtype == truth.dtype, name
            assert value.shape == truth.shape, name
            if truth.numel():
                error = (value.double() - truth.double()).abs().max()
                scale = truth.double().abs().max().clamp(min=1)
                assert error <= TOLERANCE[truth.dtype] * scale, name


@each(
    [c for c in CASES if plain_name(c) not in EMPTY],
    [torch.float32],
    [torch.float64, torch.float16],
)
def test_function_bodies_in_onnxruntime(lowered: Lowered, case: Case, dtype: torch.dtype) -> None:
    check(lowered, in_onnxruntime, case, dtype)


@each(CASES, [torch.float32], [torch.float64])
def test_function_bodies_in_onnx_own_evaluator(
    lowered: Lowered, case: Case, dtype: torch.dtype
) -> None:
    check(lowered, in_evaluator, case, dtype)


@pytest.mark.parametrize("opset", OPSETS)
def test_every_opset_has_bodies(lowered: Lowered, opset: int) -> None:
    for case in CASES:
        if case.name in ("groups", "groups_gate_before_norm"):
            check(lowered, in_onnxruntime, case, torch.float32, opset)
            check(lowered, in_evaluator, case, torch.float32, opset)


def test_there_is_a_body_for_every_operator() -> None:
    for spec in SPECS.values():
        operators = {operator.name for operator in spec.operators}
        assert set(spec.lowering().decompositions()) == operators
        assert {function.name for function in spec.lowering().functions(18)} == operators


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 0.0, 1.0, 3e38, 5e-324, 1.7976931348623157e308])
def test_eps_reaches_the_node_as_the_same_float64(eps: float) -> None:
    given = SPECS["rms_norm"].lowering().attributes(eps, 1)
    assert 2.0 ** given["eps_exponent"] * given["eps_mantissa"] == eps or eps < 1e-300
    assert np.ldexp(float(given["eps_mantissa"]), given["eps_exponent"]) == eps


@each(CASES, [torch.float32, torch.bfloat16], [torch.float64, torch.float16])
def test_fused_bits_are_torchs_on_one_thread_and_on_two(
    fused_library: Path, lowered: Lowered, case: Case, dtype: torch.dtype
) -> None:
    for operator, inputs, names in both(case, dtype):
        if operator.endswith("_backward"):  # its rstd, too, has to be the kernel's
            rstd = SPECS[case.operator].operator(case.operator)(*case.make(dtype, 0).values())[1]
            position = SPECS[case.operator].operator(operator).inputs.index("rstd")
            inputs[position] = rstd
        expected = SPECS[case.operator].operator(operator)(*inputs)
        for threads in (1, 2):
            got = lowered(fused, operator, inputs, threads)
            for name, value, truth in zip(names, got, expected, strict=False):
                assert value.dtype == truth.dtype, name
                assert value.shape == truth.shape, name
                np.testing.assert_array_equal(value.double().numpy(), truth.double().numpy(), name)


GOOD = {"eps_mantissa": 1, "eps_exponent": -20, "group_size": 4, "norm_before_gate": 1}
WRONG: dict[str, tuple[dict[str, tuple[int, ...]], dict[str, int], str]] = {
    "x": ({"x": ()}, {}, r"x must be \(..., d\); got \(\)"),
    "z": ({"z": (2, 7)}, {}, r"z must be x's shape = \(2, 8\); got \(2, 7\)"),
    "weight": ({"weight": (7,)}, {}, r"weight must be \(d,\) = \(8,\); got \(7,\)"),
    "group_size": ({}, {"group_size": 3}, "group_size must be a divisor of 8 channels; got 3"),
    "no group_size": ({}, {"group_size": 0}, "group_size must be a divisor of 8 channels; got 0"),
    "mantissa": ({}, {"eps_mantissa": -1}, "eps_mantissa must be not negative; got -1"),
    "exponent": ({}, {"eps_exponent": 2**40}, "eps_exponent must be in -1200 to 960"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_is_refused_by_name(fused_library: Path, what: str) -> None:
    shapes, attributes, message = WRONG[what]
    sizes = {"x": (2, 8), "z": (2, 8), "weight": (8,)} | shapes
    inputs = [torch.ones(size) for size in sizes.values()]
    # Sizes are open, but not their number: for x without dimensions all are of its rank.
    if what == "x":
        inputs[1] = inputs[0]
    with pytest.raises(InvalidArgument, match=f"fuseport.ops::rms_norm_gated: {message}"):
        fused("rms_norm_gated", inputs, GOOD | attributes, 1)
    if what != "x":
        inputs.insert(0, torch.ones(2, 8))
        with pytest.raises(InvalidArgument, match=message):
            fused("rms_norm_gated_backward", inputs, GOOD | attributes, 1)


@pytest.mark.parametrize("shape", [(2**40, 0), (0, 2**40, 0)], ids=str)
def test_sizes_that_no_memory_holds_do_no_harm_where_nothing_is(
    fused_library: Path, shape: tuple[int, ...]
) -> None:
    x, weight = torch.ones(shape), torch.ones(0)
    given = {name: GOOD[name] for name in ("eps_mantissa", "eps_exponent", "group_size")}
    [out] = fused("rms_norm", [x, weight], given, 1)
    assert out.shape == shape
    dx, dweight = fused("rms_norm_backward", [x, x, weight], given, 1)
    assert dx.shape == shape
    assert dweight.shape == (0,)
