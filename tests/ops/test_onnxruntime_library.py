"""The kernels inside ONNX Runtime give torch's bits, on its own threads, and refuse what is wrong.

Nodes have no function bodies here: nothing but a kernel of the library can run them.
"""

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from onnxruntime.capi.onnxruntime_pybind11_state import (
    Fail,
    InvalidArgument,
    InvalidGraph,
    RuntimeException,
)
from torch import Tensor

from fuseport.exporter.runtimes._onnxruntime import from_value, to_value
from fuseport.ops import OPS, onnxruntime_library, ort
from fuseport.ops.spec import FLOATING, OpSpec

SPEC = OPS["selective_scan"]
LOWERING = SPEC.lowering()
FORWARD = {case.name: case for case in SPEC.cases if case.lowers}
TYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.float64: TensorProto.DOUBLE,
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
}
STATE = {"A", "D", "delta_bias", "last_state"}  # and their cotangents and gradients


@pytest.fixture(autouse=True)
def _library(fused_library: Path, spec: OpSpec) -> None:
    """Skips what cannot be built here; torch's operators are the native ones."""


@cache
def functions() -> dict[str, tuple[list[str], list[str]]]:
    """Inputs and outputs of each node, as the lowering names them."""
    return {f.name: (list(f.input), list(f.output)) for f in LOWERING.functions(20)}


@cache
def session(
    name: str, dtype: torch.dtype, softplus: int, threads: int = 1
) -> onnxruntime.InferenceSession:
    inputs, outputs = functions()[name]
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def value(tensor: str) -> Any:
        of_state = tensor in STATE or tensor.removeprefix("d") in STATE
        return helper.make_tensor_value_info(tensor, TYPES[wide if of_state else dtype], None)

    domain = LOWERING.DOMAIN
    node = helper.make_node(name, inputs, outputs, domain=domain, delta_softplus=softplus)
    graph = helper.make_graph([node], "g", list(map(value, inputs)), list(map(value, outputs)))
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(domain, LOWERING.VERSION)]
    return opened(helper.make_model(graph, opset_imports=opsets, ir_version=10), threads)


def opened(model: Any, threads: int = 1) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = threads
    options.register_custom_ops_library(str(onnxruntime_library()))
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def run(name: str, inputs: Sequence[Tensor], softplus: int, threads: int = 1) -> list[Tensor]:
    names, outputs = functions()[name]
    dtype = inputs[names.index("u")].dtype
    values = dict(zip(names, map(to_value, inputs), strict=True))
    results = session(name, dtype, softplus, threads).run_with_ort_values(outputs, values)
    return [from_value(result) for result in results]


def assert_equal(names: Sequence[str], got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """To the bit, but for the bits of NaN."""
    for name, value, truth in zip(names, got, expected, strict=True):
        assert value.dtype == truth.dtype, name
        assert value.shape == truth.shape, name
        np.testing.assert_array_equal(value.double().numpy(), truth.double().numpy(), name)
        assert torch.equal(torch.signbit(value), torch.signbit(truth)), name


Node = Callable[..., tuple[str, list[Tensor], int]]


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Node:
    """The one node that an operator becomes: its name, its inputs, `delta_softplus`."""

    def lowered(operator: str, inputs: Sequence[Any]) -> tuple[str, list[Tensor], int]:
        seen: list[tuple[str, list[Tensor], int]] = []

        def symbolic(name: str, given: Sequence[Tensor], attributes: Any, **rest: Any) -> Any:
            plain = name.removeprefix(f"{LOWERING.DOMAIN}::")
            seen.append((plain, [t.contiguous() for t in given], attributes["delta_softplus"]))
            types_of = zip(rest["dtypes"], rest["shapes"], strict=True)
            return [torch.zeros(shape, dtype=dtype) for dtype, shape in types_of]

        monkeypatch.setattr(torch.onnx.ops, "symbolic_multi_out", symbolic)
        LOWERING.decompositions()[operator](*inputs)
        [only] = seen
        return only

    return lowered


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("name", FORWARD)
def test_bits_are_torchs_on_one_thread_and_on_two(
    node: Node, name: str, dtype: torch.dtype
) -> None:
    forward = SPEC.operator(FORWARD[name].operator)
    op, inputs, softplus = node(forward.name, list(FORWARD[name].make(dtype, 0).values()))
    *expected, chunk_states = forward(*inputs, bool(softplus))
    for threads in (1, 2):
        assert_equal(forward.outputs[:2], run(op, inputs, softplus, threads), expected)

    backward = SPEC.operator(forward.backward or "")
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(t.shape, generator=generator).to(t.dtype) for t in expected]
    gradients = backward(*cotangents, *inputs, chunk_states, bool(softplus))
    for threads in (1, 2):
        got = run(backward.name, [*cotangents, *inputs], softplus, threads)
        assert_equal(backward.outputs, got, gradients)


@pytest.mark.parametrize(("b", "d", "n"), [(7, 1, 4), (40, 3, 2)])
def test_sums_over_many_batches_are_torchs_too(b: int, d: int, n: int) -> None:
    """In float64, where no rounding hides another order of the sum."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(b, d, 5), (b, d, n), (b, d, 5), (b, d, 5), (d, n)]
    sizes += [(b, 1, n, 5), (b, 1, n, 5), (d,), (d,)]
    inputs = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    *_, chunk_states = SPEC.operator("selective_scan")(*inputs[2:], True)
    backward = SPEC.operator("selective_scan_backward")
    got = run(backward.name, inputs, 1)
    assert_equal(backward.outputs, got, backward(*inputs, chunk_states, True))


def test_sessions_in_several_threads_at_once(node: Node) -> None:
    case = FORWARD["many_units"]
    op, inputs, softplus = node(case.operator, list(case.make(torch.float32, 0).values()))
    expected = run(op, inputs, softplus)
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda i: run(op, inputs, softplus, i % 2 + 1), range(12)):
            assert_equal(("out", "last_state"), got, expected)


def inputs_of(case: str) -> list[Any]:
    """As the nodes take them, for cases with B and C of four dimensions."""
    return list(FORWARD[case].make(torch.float32, 0).values())


def test_calls_are_counted_by_op() -> None:
    library = onnxruntime_library()
    before = ort.calls(library, "selective_scan_gated")
    assert before is not None
    *inputs, softplus = inputs_of("gated")
    run("selective_scan_gated", inputs, softplus)
    assert ort.calls(library, "selective_scan_gated") == before + 1
    assert ort.calls(library, "no_such_op") is None


WRONG = {
    "u": ((2, 6), r"u must be \(b, d, l\); got \(2, 6\)"),
    "delta": ((2, 6, 8), r"delta must be u's shape = \(2, 6, 9\); got \(2, 6, 8\)"),
    "A": ((4, 6), r"A must be \(d, N\) = \(6, 6\); got \(4, 6\)"),
    "B": ((2, 4, 4, 9), "B must be of groups that divide 6 channels; got 4"),
    "C": ((2, 3, 4, 9), r"C must be of B's shape .* = \(2, 1, 4, 9\); got \(2, 3, 4, 9\)"),
    "D": ((), r"D must be \(d,\) = \(6,\); got \(\)"),
    "z": ((2, 7, 9), r"z must be u's shape"),
    "delta_bias": ((7,), r"delta_bias must be \(d,\) = \(6,\); got \(7,\)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_shapes_that_do_not_fit_are_refused_by_name(name: str) -> None:
    *inputs, softplus = inputs_of("gated")
    names = functions()["selective_scan_gated"][0]
    shape, message = WRONG[name]
    wrong = [torch.zeros(shape) if n == name else t for n, t in zip(names, inputs, strict=True)]
    with pytest.raises(InvalidArgument, match=f"fuseport.ops::selective_scan_gated: {message}"):
        run("selective_scan_gated", wrong, softplus)
    cotangents = [torch.zeros(2, 6, 9), torch.zeros(2, 6, 4)]
    with pytest.raises(InvalidArgument, match=message):
        run("selective_scan_gated_backward", [*cotangents, *wrong], softplus)
    run("selective_scan_gated", inputs, softplus)  # the session still works


@pytest.mark.parametrize("name", ["dout", "dlast_state"])
def test_cotangents_that_do_not_fit_are_refused(name: str) -> None:
    *inputs, softplus = inputs_of("gated")
    cotangents = {"dout": torch.zeros(2, 6, 9), "dlast_state": torch.zeros(2, 6, 4)}
    cotangents[name] = torch.zeros(2, 6, 1)
    with pytest.raises(InvalidArgument, match=f"{name} must be"):
        run("selective_scan_gated_backward", [*cotangents.values(), *inputs], softplus)


# b, d, l, N, G: sizes that only a zero beside them makes possible.
HUGE = {
    "batch": (2**40, 1, 0, 0, 1),
    "batch_and_channels_of_nothing": (2**40, 0, 0, 1, 1),
    "length": (0, 1, 2**59, 1, 1),
    "states": (0, 0, 1, 2**59, 1),
    "groups": (0, 0, 0, 0, 2**59),
}


@pytest.mark.parametrize("sizes", HUGE.values(), ids=HUGE)
def test_sizes_that_no_memory_holds_do_no_harm_where_nothing_is(sizes: tuple[int, ...]) -> None:
    b, d, l, n, g = sizes  # noqa: E741
    shapes = [(b, d, l), (b, d, l), (d, n), (b, g, n, l), (b, g, n, l), (d,), (d,)]
    inputs = [torch.ones(shape) for shape in shapes]
    out, last_state = run("selective_scan", inputs, 1)
    assert out.shape == (b, d, l)
    assert last_state.shape == (b, d, n)
    cotangents = [torch.ones(b, d, l), torch.ones(b, d, n)]
    gradients = run("selective_scan_backward", [*cotangents, *inputs], 1)
    assert [g.shape for g in gradients] == [t.shape for t in inputs]
    assert not any(g.any() for g in gradients)


def test_a_state_that_no_memory_holds_is_refused() -> None:
    b = 2**46  # times 4 bytes: more than there are addresses
    shapes = [(b, 1, 0), (b, 1, 0), (1, 1), (b, 1, 1, 0), (b, 1, 1, 0), (1,), (1,)]
    with pytest.raises(Fail, match="allocate"):
        run("selective_scan", [torch.ones(shape) for shape in shapes], 1)


@pytest.mark.parametrize(
    ("dtype", "attributes", "reason"),
    [
        pytest.param(TensorProto.INT32, {"delta_softplus": 1}, "int32", id="dtype"),
        pytest.param(TensorProto.FLOAT, {}, "delta_softplus", id="no_attribute"),
        pytest.param(
            TensorProto.FLOAT, {"delta_softplus": "on"}, "Attribute name and type", id="text"
        ),
    ],
)
def test_nodes_that_are_none_of_ours_are_refused_when_they_are_loaded(
    dtype: int, attributes: dict[str, Any], reason: str
) -> None:
    names = functions()["selective_scan"]
    inputs, outputs = ([helper.make_tensor_value_info(n, dtype, None) for n in p] for p in names)
    node = helper.make_node("selective_scan", *names, domain="fuseport.ops", **attributes)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("fuseport.ops", 1)]
    graph = helper.make_graph([node], "g", inputs, outputs)
    with pytest.raises((Fail, InvalidGraph, RuntimeException), match=reason):
        opened(helper.make_model(graph, opset_imports=opsets, ir_version=10))


def test_the_library_outlives_the_sessions_that_used_it() -> None:
    """In a process of its own, which has to end well too; torch is not in it."""
    code = f"""
import sys
import numpy as np, onnxruntime
from onnx import TensorProto, helper
names = ["u", "delta", "A", "B", "C", "D", "delta_bias"], ["out", "last_state"]
values = [[helper.make_tensor_value_info(n, 1, None) for n in part] for part in names]
node = helper.make_node("selective_scan", *names, domain="fuseport.ops", delta_softplus=1)
opsets = [helper.make_opsetid("", 20), helper.make_opsetid("fuseport.ops", 1)]
graph = helper.make_graph([node], "g", *values)
model = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
shapes = [(1, 2, 3)] * 2 + [(2, 4)] + [(1, 1, 4, 3)] * 2 + [(2,)] * 2
feed = {{n: np.ones(s, np.float32) for n, s in zip(names[0], shapes)}}
seen = set()
for _ in range(3):
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library({str(onnxruntime_library())!r})
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    del options
    seen.add(session.run(None, feed)[0].tobytes())
    del session
assert len(seen) == 1 and "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_library_needs_neither_torch_nor_python() -> None:
    command = ["readelf", "-d", str(onnxruntime_library())]
    done = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    needed = [line for line in done.splitlines() if "NEEDED" in line]
    assert needed
    assert not any(re.search("torch|c10|python|gomp|onnxruntime", line) for line in needed)
