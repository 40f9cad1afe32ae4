"""Libraries of CUDA kernels: what is compiled for which GPUs, and found where there is no nvcc.

The compilers here are scripts that say so; `.ci/nvcc` compiles the kernels.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fuseport.exporter.doctor import Check, diagnose
from fuseport.exporter.errors import Missing, UsageError
from fuseport.exporter.user_code import op_choice
from fuseport.ops import OPS, build, cuda, ort
from fuseport.tests.ops.cuda_on_cpu import stand_in

SPEC = OPS["selective_scan"]
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc here")


def check_of(name: str) -> Check:
    return next(check for check in diagnose().checks if check.name == name)


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A torch of CUDA 13, an nvcc and a C++ compiler that only say so; their log."""
    log = tmp_path / "log"
    script = (
        f"#!/bin/sh\necho \"$0 $@\" >> '{log}'\n"
        'case "$*" in *--version*) echo "release 13.0, V13.0.88"; exit;; esac\n'
        'case "$*" in *--dryrun*) echo \'#$ INCLUDES="-I/headers/of/cuda"\' >&2\n'
        f'echo \'#$ LIBRARIES=  "-L{tmp_path}/stubs" "-L{tmp_path}"\' >&2; exit;; esac\n'
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
    monkeypatch.setenv(ort.HEADERS, str(tmp_path))
    for name in ("libcudart_static.a", "onnxruntime_c_api.h"):
        (tmp_path / name).touch()
    caches = (build.compiler_version, cuda._folders)
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
    first = cuda.library_path(SPEC)
    assert first.name.startswith("selective_scan-cuda-80_90-")
    monkeypatch.setenv(cuda.ARCHITECTURES, "100")
    assert cuda.cached(SPEC) is None
    assert cuda.library_path(SPEC).name.startswith("selective_scan-cuda-100-")
    monkeypatch.setenv(cuda.ARCHITECTURES, "sm_90")
    with pytest.raises(build.BuildError, match="not like 80;90"):
        cuda.architectures()


@pytest.mark.parametrize("gpu", [80, 86, 90, 100])
def test_what_was_compiled_for_a_gpu_serves_it_without_nvcc(
    gpu: int, stand_ins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in an image that is made on a machine without a GPU, and run on one without nvcc."""
    for_torch, for_onnxruntime = cuda.library_path(SPEC), ort.library([SPEC], "cuda")
    monkeypatch.delenv(cuda.ARCHITECTURES)
    monkeypatch.setattr(cuda, "_present", lambda: (gpu,))
    monkeypatch.setenv("NVCC", "no-such-nvcc")
    assert cuda.wanted(SPEC)
    assert cuda.cached(SPEC) == for_torch
    assert ort.status([SPEC], "cuda") == build.Status("built", str(for_onnxruntime))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert cuda.library_path(SPEC) == for_torch
    assert ort.library([SPEC], "cuda") == for_onnxruntime


def test_the_best_of_what_was_compiled_serves(
    stand_ins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {}
    for targets in ("80", "90", "80;90", "100"):
        monkeypatch.setenv(cuda.ARCHITECTURES, targets)
        paths[targets] = cuda.library_path(SPEC)
    monkeypatch.delenv(cuda.ARCHITECTURES)
    present = [90]
    monkeypatch.setattr(cuda, "_present", lambda: tuple(present))
    assert cuda.cached(SPEC) == paths["90"]
    paths["90"].unlink()
    assert cuda.cached(SPEC) == paths["80;90"]  # with nvcc, too: nothing is compiled again
    paths["80;90"].unlink()
    assert cuda.cached(SPEC) is None  # nvcc makes better code than what 80 has
    monkeypatch.setenv("NVCC", "no-such-nvcc")
    assert cuda.cached(SPEC) == paths["80"]  # by its PTX
    paths["80"].unlink()
    with pytest.raises(build.BuildError, match="no-such-nvcc"):
        cuda.cached(SPEC)  # what is for newer GPUs is of no use


def test_the_command_that_compiles_has_those_of_cuda(
    stand_ins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And says why there is none; where GPUs are named, that is an error."""
    plain = replace(SPEC, name="plain", package="fuseport.ops.vocabulary")
    lines = dict(line.split(": ", 1) for line in op_choice.built([SPEC, plain]))
    assert lines["selective_scan on CUDA"] == str(cuda.cached(SPEC))
    assert lines["plain"] == "plain torch, nothing to compile"
    assert "onnxruntime-cuda-80_90-" in lines["onnxruntime on CUDA"]
    assert len(lines) == 5
    assert check_of("op selective_scan on CUDA").found == f"compiled: {cuda.cached(SPEC)}"
    monkeypatch.setenv("NVCC", "no-such-nvcc")
    monkeypatch.setenv(cuda.ARCHITECTURES, "70")
    with pytest.raises(Missing, match="selective_scan on CUDA: NVCC names 'no-such-nvcc'"):
        list(op_choice.built([SPEC]))
    monkeypatch.delenv(cuda.ARCHITECTURES)
    monkeypatch.setattr(cuda, "_present", lambda: (75,))
    assert not any("on CUDA" in line for line in op_choice.built([SPEC]))
    monkeypatch.setattr(cuda, "_present", lambda: (120,))
    monkeypatch.setenv("FUSEPORT_CACHE", str(stand_ins.parent / "empty"))
    check = check_of("op selective_scan on CUDA")
    assert (check.status, check.found) == ("warning", "runs in plain torch there, slowly")
    assert "no-such-nvcc" in check.advice
    said = dict(line.split(": ", 1) for line in op_choice.built([SPEC]))
    assert said["selective_scan on CUDA"].startswith("none: NVCC names 'no-such-nvcc'")
    monkeypatch.setenv(cuda.ARCHITECTURES, "sm_90")
    with pytest.raises(UsageError, match="not like 80;90"):
        list(op_choice.built([SPEC]))


def test_a_torch_without_cuda_gets_none_and_says_so(
    stand_ins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    lines = list(op_choice.built([SPEC]))
    assert "on CUDA: none for torch, which was built without CUDA" in lines
    assert any(line.startswith("onnxruntime on CUDA: ") for line in lines)


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
    assert not cuda.wanted(replace(SPEC, package="fuseport.ops.vocabulary"))  # without kernels


def test_onnx_runtimes_library_has_cudas_runtime_and_no_torch(
    stand_ins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)  # which it has no need of
    assert ort.status(OPS.values(), "cuda").state == "buildable"
    path = ort.library(OPS.values(), "cuda")
    assert path.name.startswith("onnxruntime-cuda-")
    assert ort.status(OPS.values(), "cuda") == build.Status("built", str(path))
    assert ort.status(OPS.values()).detail != str(path)
    calls = [line.split() for line in stand_ins.read_text().splitlines()]
    sources = {call[call.index("-c") + 1]: call for call in calls if "-o" in call and "-c" in call}
    specs = [spec for spec in OPS.values() if ort.bound(spec, "cuda")]
    expected = stand_in.onnxruntime_units(specs)  # what tests run without a GPU is the same
    assert sources.keys() == {str(unit.source) for unit in expected}
    for source, call in sources.items():
        assert call[0].endswith("/nvcc" if source.endswith(".cu") else "/c++"), source
        assert not any("torch" in word for word in call if word != "-fno-trapping-math"), source
        assert any("arch=compute_80" in word for word in call) == source.endswith(".cu")
    [link] = [call for call in calls if "-shared" in call]
    assert f"-L{stand_ins.parent}" in link
    assert link.index("-lcudart_static") > max(i for i, w in enumerate(link) if w.endswith(".o"))


def test_onnx_runtimes_library_says_what_it_lacks(
    stand_ins: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (stand_ins.parent / "libcudart_static.a").unlink()
    with pytest.raises(build.BuildError, match="static runtime is not beside") as caught:
        ort.library([SPEC], "cuda")
    assert ort.status([SPEC], "cuda") == build.Status("unavailable", str(caught.value))
    monkeypatch.delenv(cuda.ARCHITECTURES)
    monkeypatch.setattr(cuda, "_present", lambda: (75,))
    with pytest.raises(build.BuildError, match="there is no GPU of compute capability") as none:
        ort.library([SPEC], "cuda")
    assert cuda.ARCHITECTURES in str(none.value)


def test_all_kernels_say_how_many_threads_they_have() -> None:
    """And have shared memory by their launch: what a GPU refuses else, a CPU in its place does not.

    Registers for so many threads there are then, and a launch asks for memory that GPUs have to be
    asked for: it knows of all that there is.
    """
    device = build.OPS_FOLDER / "native" / "cuda_device.cuh"
    for source in build.OPS_FOLDER.rglob("*.cu*"):
        text = source.read_text()
        kernels = text.count("__global__")
        assert text.count("__global__ void __launch_bounds__(") == kernels, source
        assert source == device or not re.search("__shared__|<<<", text), source


@needs_nvcc
def test_what_is_asked_for_of_a_weight_leaves_registers_for_the_product(tmp_path: Path) -> None:
    source = tmp_path / "product.cu"
    source.write_text("""
#include "matmul_nbits/kernel.cuh"
#include "native/cuda_stored_products.cuh"
using namespace fuseport;
template __global__ void stored::cuda::product_kernel<
    matmul_nbits::cuda::Weight, cuda::Tilings<cuda::Half>::Large, false>(
    matmul_nbits::Problem, stored::cuda::Product);
""")
    command = [*cuda.compile_command((90,)), "-Xptxas=-v", "-c", source, "-o", f"{source}.o"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    spilled = re.findall(r"(\d+) bytes spill", done.stderr)
    assert spilled
    assert set(spilled) == {"0"}


@needs_nvcc
def test_onnx_runtimes_library_loads_without_a_gpu(
    fused_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And runs what it has no kernel for on the CPU: a session registers it in a fresh process."""
    monkeypatch.setenv(cuda.ARCHITECTURES, "90")
    path = ort.library([OPS["cross_merge"]], "cuda")
    needed = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True)
    found = re.findall(r"NEEDED.*\[(.*)\]", needed.stdout)
    assert found
    assert not [name for name in found if re.search("torch|c10|cuda|python|onnxruntime", name)]
    code = f"""
import numpy, onnxruntime
from onnx import TensorProto, helper
x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [2]) for n in "xy")
graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", [x], [y])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
options = onnxruntime.SessionOptions()
options.register_custom_ops_library({str(path)!r})
session = onnxruntime.InferenceSession(
    model.SerializeToString(), options, providers=["CPUExecutionProvider"]
)
assert session.run(None, {{"x": numpy.ones(2, numpy.float32)}})[0].tolist() == [-1, -1]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
