"""CUDA kernels of ops: what is built where, and, where there is a GPU, what they compute there.

What nvcc makes of the kernels is compiled by `.ci/nvcc`; their arithmetic without a GPU is in
`test_cuda_on_cpu.py` and `test_<op>_cuda_on_cpu.py`.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fuseport.ops import OPS, build, cuda, registration
from fuseport.ops.spec import FLOATING, Case, Inputs, Operator, OpSpec, as_tuple

SPEC = OPS["selective_scan"]
SPECS = [spec for spec in OPS.values() if spec.has("kernel.cu")]
OF_OPERATOR = {operator.name: spec for spec in SPECS for operator in spec.operators}
ROOT = Path(__file__).parent.parent.parent
DEVICE = torch.device("cuda")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
# Of each operator a case with many units of work, or else its first.
BUSY = [
    next((c for c in reversed(cases) if c.name.endswith(("many_units", "rows_300"))), cases[0])
    for spec in SPECS
    for operator in spec.operators
    if (cases := [c for c in spec.cases if c.operator == operator.name])
]
# Torch's own products of matrices are deterministic with it; torch reads it at the first of them.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A torch of CUDA 13, an nvcc and a C++ compiler that only say so; their log."""
    log = tmp_path / "log"
    script = (
        f"#!/bin/sh\necho \"$0 $@\" >> '{log}'\n"
        'case "$*" in *--version*) echo "release 13.0, V13.0.88"; exit;; esac\n'
        'case "$*" in *--dryrun*) echo \'#$ INCLUDES="-I/headers/of/cuda"\' >&2; exit;; esac\n'
        'while [ "$1" != -o ]; do shift; done; echo > "$2"\n'
    )
    for name in ("nvcc", "c++"):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("NVCC", str(tmp_path / "nvcc"))
    monkeypatch.setenv("CXX", str(tmp_path / "c++"))
    monkeypatch.setenv("FUSEPORT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(cuda.ARCHITECTURES, "90;80")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    caches = (build.compiler_version, cuda._version, cuda._includes)
    for function in caches:
        function.cache_clear()
    yield log
    for function in caches:
        function.cache_clear()


def test_the_library_lies_beside_that_of_the_cpu(stand_ins: Path) -> None:
    own = build._for_torch(SPEC)
    assert cuda.wanted(SPEC)
    assert not cuda.settled(SPEC)
    with pytest.raises(build.BuildError, match="cannot load"):
        cuda.load(SPEC)
    path = cuda.cached(SPEC)
    assert path is not None
    assert path.name.startswith("selective_scan-cuda-")
    assert cuda.settled(SPEC)
    assert build._for_torch(SPEC).link == own.link
    calls = [line.split() for line in stand_ins.read_text().splitlines()]
    [kernels] = [call for call in calls if str(SPEC.folder / "kernel.cu") in call]
    assert kernels[0].endswith("/nvcc")
    assert [flag for flag in kernels if "gencode" in flag] == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90,code=sm_90",
        "-gencode=arch=compute_90,code=compute_90",
    ]
    [binding] = [call for call in calls if str(SPEC.folder / "cuda.cpp") in call]
    assert "-I/headers/of/cuda" in binding
    [link] = [call for call in calls if "-shared" in call]
    assert "-lc10_cuda" in link


def test_other_architectures_another_library(
    stand_ins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build._source_key(cuda._library(SPEC).units)
    monkeypatch.setenv(cuda.ARCHITECTURES, "100")
    assert build._source_key(cuda._library(SPEC).units) != first
    monkeypatch.setenv(cuda.ARCHITECTURES, "sm_90")
    with pytest.raises(build.BuildError, match="not like 80;90"):
        cuda.architectures()


def test_an_nvcc_of_another_cuda_is_refused(
    stand_ins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with pytest.raises(build.BuildError, match="is of CUDA 13, and torch was built with CUDA 12"):
        cuda.load(SPEC)


def test_without_nvcc_the_reason_is_said(stand_ins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVCC", "no-such-nvcc")
    with pytest.raises(build.BuildError, match="no-such-nvcc"):
        cuda.load(SPEC)
    assert cuda.settled(SPEC)  # nothing that an import could wait for


def test_a_torch_without_cuda_wants_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cuda.ARCHITECTURES, "90")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert not cuda.wanted(SPEC)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert cuda.wanted(SPEC)
    assert not cuda.wanted(OPS["swiglu"])  # which has no CUDA kernels


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_the_benchmark_says_that_there_is_no_gpu() -> None:
    script = ROOT / "tests" / "benchmarks" / "gpu.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 5
    assert done.stderr.startswith("nothing is measured: ")


def on_gpu(inputs: Inputs) -> Inputs:
    return {k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in inputs.items()}


def widened(inputs: Inputs) -> Inputs:
    return {
        k: v.to(torch.promote_types(v.dtype, torch.float64))
        if isinstance(v, Tensor) and (v.is_floating_point() or v.is_complex())
        else v
        for k, v in inputs.items()
    }


def both(spec: OpSpec, operator: Operator, inputs: Inputs, reference: bool) -> dict[str, Tensor]:
    """Outputs and gradients, by operators or their references, for cotangents of a fixed seed."""

    def run(operator: Operator, *given: object) -> tuple[Tensor, ...]:
        return as_tuple((operator.reference if reference else operator)(*given))

    outputs = dict(zip(operator.outputs, run(operator, *inputs.values()), strict=True))
    if operator.backward is None:
        return outputs
    gradient = spec.operator(operator.backward)
    generator = torch.Generator().manual_seed(2)
    cotangents = {
        "d" + name: torch.randn(
            outputs[name].shape,
            generator=generator,
            dtype=torch.promote_types(outputs[name].dtype, torch.float64),
        ).to(outputs[name])
        for name in spec.differentiable(operator)[1]
    }
    known = {**inputs, **outputs, **cotangents}
    gradients = run(gradient, *(known[name] for name in gradient.inputs))
    return outputs | dict(zip(gradient.outputs, gradients, strict=True))


def registered(case: Case) -> tuple[OpSpec, Operator]:
    spec = OF_OPERATOR[case.operator]
    registration.ensure(spec)
    return spec, spec.operator(case.operator)


@needs_gpu
@pytest.mark.in_turn(
    [case for spec in SPECS for case in spec.cases], FLOATING, [case.name for case in BUSY]
)
def test_a_gpu_is_as_good_as_the_reference(case: Case, dtype: torch.dtype) -> None:
    spec, operator = registered(case)
    inputs = case.make(dtype, 1)
    truth = both(spec, operator, widened(inputs), reference=True)
    baseline = both(spec, operator, inputs, reference=True)
    found = both(spec, operator, on_gpu(inputs), reference=False)
    assert found.keys() == truth.keys()
    for name, value in found.items():
        if value.numel() == 0:
            continue
        expected = truth[name]
        error = (value.cpu().to(expected.dtype) - expected).abs().max()
        allowed = 3 * (baseline[name].to(expected.dtype) - expected).abs().max()
        ulps = 256 if value.dtype == expected.dtype else 8  # the truth is no better in float64
        allowed += ulps * torch.finfo(value.dtype).eps * expected.abs().max()
        assert error <= allowed, f"{name}: off by {error:.3g}, allowed {allowed:.3g}"


def busy_ids(case: Case) -> str:
    return f"{case.operator}-{case.name}"


@needs_gpu
@pytest.mark.parametrize("case", BUSY, ids=busy_ids)
def test_a_gpu_repeats_itself_and_makes_nobody_wait(case: Case) -> None:
    spec, operator = registered(case)
    inputs = on_gpu(case.make(torch.float32, 3))
    first = both(spec, operator, inputs, reference=False)
    for _ in range(3):
        again = both(spec, operator, inputs, reference=False)
        assert all(torch.equal(again[key], first[key]) for key in first)
    run = passes(spec, operator, inputs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def passes(spec: OpSpec, operator: Operator, inputs: Inputs) -> Callable[[], tuple[Tensor, ...]]:
    """Runs forward and backward, with cotangents of ones that lie on the device already."""
    outputs = dict(zip(operator.outputs, operator(*inputs.values()), strict=True))
    cotangents = {"d" + n: torch.ones_like(outputs[n]) for n in spec.differentiable(operator)[1]}

    def run() -> tuple[Tensor, ...]:
        found = operator(*inputs.values())
        if operator.backward is None:
            return found
        gradient = spec.operator(operator.backward)
        known = {**inputs, **dict(zip(operator.outputs, found, strict=True)), **cotangents}
        return (*found, *gradient(*(known[name] for name in gradient.inputs)))

    return run


@needs_gpu
@pytest.mark.parametrize("case", BUSY, ids=busy_ids)
def test_a_cuda_graph_holds_both_passes(case: Case) -> None:
    spec, operator = registered(case)
    run = passes(spec, operator, on_gpu(case.make(torch.float32, 4)))
    expected = run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))
