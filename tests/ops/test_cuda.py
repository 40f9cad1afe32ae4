"""CUDA kernels of ops: where there is a GPU, what all of them compute there.

What nvcc makes of the kernels is compiled by `.ci/nvcc`; their arithmetic without a GPU is in the
`test_…cuda_on_cpu.py`, and what is compiled when in `test_cuda_build.py`.
"""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fuseport.ops import OPS, registration, support
from fuseport.ops.spec import Case, Inputs, Operator, OpSpec
from fuseport.tests.ops.cuda_on_cpu import stand_in
from fuseport.tests.ops.tensor_cores import CHUNKED, RULES

SPEC = OPS["selective_scan"]
ROOT = Path(__file__).parent.parent.parent
DEVICE = torch.device("cuda")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
# Torch's own products of matrices are deterministic with it; torch reads it at the first of them.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

TENSOR_CORES = [
    pytest.param(OPS[name], case, dtype, id=f"{name}-{case.name}-{dtype}")
    for name, cases in (("ssd_chunk_scan", CHUNKED), ("gated_delta_rule", RULES))
    for case in cases
    for dtype in case.dtypes
]
SPECS = [spec for spec in OPS.values() if spec.has("kernel.cu")]
# Each case in one of its dtypes, which take turns.
PAIRS = [
    pytest.param(spec, case, dtype, id=f"{case.operator}-{case.name}-{dtype}")
    for spec in SPECS
    for i, case in enumerate(spec.cases)
    for dtype in [case.dtypes[i % len(case.dtypes)]]
] + TENSOR_CORES


def larger(spec: OpSpec) -> list[Case]:
    """A case of each operator, if there is one a case of many blocks."""
    found: dict[str, Case] = {}
    for case in spec.cases:
        if case.operator not in found or case.name.endswith(("many_units", "rows_300")):
            found[case.operator] = case
    return list(found.values())


# In float16 and bfloat16 too, in which kernels may be others.
LARGE = [
    pytest.param(spec, case, dtype, id=f"{case.operator}-{case.name}-{dtype}")
    for spec in SPECS
    for case in larger(spec)
    for dtype in dict.fromkeys((case.dtypes[0], torch.float16, torch.bfloat16))
    if dtype in case.dtypes
] + TENSOR_CORES


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_the_benchmark_says_that_there_is_no_gpu() -> None:
    script = ROOT / "tests" / "benchmarks" / "gpu.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 5
    assert done.stderr.startswith("nothing is measured: ")


def test_the_table_is_made_from_the_results(tmp_path: Path) -> None:
    """Of what a run writes; peers are not everywhere."""
    row = {"op": "selective_scan", "shape": [8, 1536, 2048, 16], "dtype": "bfloat16"}
    times = {"ours_us": 100.0, "peer_us": 150.0, "floor_us": 80.0, "floor_is": "bytes"}
    alone = {"op": "cross_scan", "shape": "32,192,56,56", "dtype": "float32", "peer_us": None}
    results = [
        {**row, "direction": "forward", **times},
        {**row, "dtype": "float32", "direction": "forward", **times, "ours_us": 50.0},
        {**times, **alone, "direction": "backward"},
    ]
    content = {"command": "python it", "date": "2026-11-22", "gpu": "a GPU", "cuda": "13.0"}
    file = tmp_path / "cuda.json"
    file.write_text(json.dumps({**content, "versions": {"torch": "2.13"}, "results": results}))
    script = ROOT / "tests" / "benchmarks" / "gpu.py"
    command = [sys.executable, script, "--markdown", "--json", file]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "| selective_scan | 8,1536,2048,16 | bfloat16 | 100.0 µs, 80%, 1.50 × |  |" in lines
    assert "| selective_scan | 8,1536,2048,16 | float32 | 50.0 µs, 160%, 3.00 × |  |" in lines
    assert "| cross_scan | 32,192,56,56 | float32 |  | 100.0 µs, 80% |" in lines
    assert "| selective_scan | 2.12 × | 1.50 × |  |  |" in lines
    assert len(lines) == 11
    one = subprocess.run(
        [*command, "--op", "cross_scan"], capture_output=True, text=True, check=True
    )
    assert "| selective_scan | 8,1536,2048,16" not in one.stdout
    assert "| selective_scan | 2.12 ×" in one.stdout


def on_gpu(inputs: Inputs) -> Inputs:
    return {k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in inputs.items()}


def registered(spec: OpSpec, operator: Operator) -> Operator:
    """The operator, whose CUDA kernel is there: what runs is not the reference."""
    registration.ensure(spec)
    for name in filter(None, (operator.name, operator.backward)):
        qualified = spec.operator(name).qualified_name
        assert torch._C._dispatch_has_kernel_for_dispatch_key(qualified, "CUDA"), qualified
    return operator


def call(operator: Operator, *inputs: Any) -> tuple[Tensor, ...]:
    return operator(*inputs)


def made(spec: OpSpec, case: Case, dtype: torch.dtype) -> tuple[Operator, Inputs, Inputs]:
    """The case's operator, inputs and cotangents, on the CPU."""
    operator = spec.operator(case.operator)
    inputs = case.make(dtype, 1)
    return operator, inputs, stand_in.cotangents_of(spec, operator, inputs, 2)


@needs_gpu
@pytest.mark.parametrize(("spec", "case", "dtype"), PAIRS)
def test_a_gpu_is_as_good_as_the_reference(spec: OpSpec, case: Case, dtype: torch.dtype) -> None:
    operator, inputs, cotangents = made(spec, case, stand_in.compared_in(case, dtype))
    reference = partial(stand_in.forward_and_backward, spec, stand_in.by_reference, operator)
    truth = reference(stand_in.widened(inputs), stand_in.widened(cotangents))
    baseline = reference(inputs, cotangents)
    found = stand_in.forward_and_backward(
        spec, call, registered(spec, operator), on_gpu(inputs), on_gpu(cotangents)
    )
    assert found.keys() == truth.keys()
    for name, value in found.items():
        expected, usual = truth[name], baseline[name]
        assert value.dtype == usual.dtype, name
        if value.numel() == 0:
            continue
        assert value.stride() == usual.stride() or value.numel() == 1, name
        error = (value.cpu().to(expected.dtype) - expected).abs().max()
        allowed = 3 * (usual.to(expected.dtype) - expected).abs().max()
        ulps = 256 if value.dtype == expected.dtype else 8  # in float64 the truth is no better
        allowed += ulps * torch.finfo(value.dtype).eps * expected.abs().max()
        assert error <= allowed, f"{name}: off by {error:.3g}, allowed {allowed:.3g}"


@needs_gpu
@pytest.mark.parametrize(("spec", "case", "dtype"), LARGE)
def test_a_gpu_repeats_itself_and_makes_nobody_wait(
    spec: OpSpec, case: Case, dtype: torch.dtype
) -> None:
    operator, inputs, cotangents = made(spec, case, dtype)
    given = on_gpu(inputs), on_gpu(cotangents)
    run = partial(stand_in.forward_and_backward, spec, call, registered(spec, operator), *given)
    first = run()
    for _ in range(3):
        again = run()
        assert all(torch.equal(again[key], first[key]) for key in first)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_gpu
@pytest.mark.parametrize(("spec", "case", "dtype"), LARGE)
def test_a_cuda_graph_holds_all_passes(spec: OpSpec, case: Case, dtype: torch.dtype) -> None:
    operator, inputs, cotangents = made(spec, case, dtype)
    given = on_gpu(inputs), on_gpu(cotangents)
    run = partial(stand_in.forward_and_backward, spec, call, registered(spec, operator), *given)
    expected = run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(captured[key], expected[key]) for key in expected)


def test_every_op_with_kernels_is_tested() -> None:
    assert {spec.name for spec in SPECS} == {
        name for name, spec in OPS.items() if support.support(spec)["CUDA"].present
    }
    tested = {case.operator for spec in SPECS for case in larger(spec)}
    for spec in SPECS:
        of_gradients = {operator.backward for operator in spec.operators}
        for operator in spec.operators:
            assert operator.name in tested or operator.name in of_gradients, operator.name
