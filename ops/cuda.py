"""Compiles and loads the CUDA kernels of ops: a library beside the op's own, where there is a GPU.

An op takes part by `cuda.cpp`, its binding to torch, and `kernel.cu`, which nvcc compiles for the
GPUs of this machine and, as PTX, for later ones. The library is apart from the op's own, which thus
stays what it is on machines without CUDA, and links nothing of it. Looking for GPUs starts no CUDA
context: a process may still fork. CUDA's runtime is the one that torch has loaded. The library for
ONNX Runtime that `ops.ort` has of the same kernels needs no torch with CUDA.

A library's name says what GPUs it is for. So what was compiled elsewhere, as in the making of an
image that is to run without nvcc, is found in the cache by a machine that has one of these.
"""

import ctypes
import functools
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from fuseport.ops import build
from fuseport.ops.build import BuildError, Library, Status, Unit
from fuseport.ops.spec import OpSpec

__all__ = [
    "ARCHITECTURES",
    "architectures",
    "cached",
    "compile_command",
    "for_these_gpus",
    "kernel_unit",
    "library_path",
    "load",
    "nvcc",
    "runtime_folders",
    "settled",
    "status",
    "wanted",
]

ARCHITECTURES = "FUSEPORT_CUDA_ARCHITECTURES"
"""The environment variable that names what to compile for, `80;90`, instead of this machine's."""

# The kernels of one source are compiled on all processors: one op's take minutes on one.
_FLAGS = ("-std=c++20", "-O3", "-Xcompiler=-fPIC,-fvisibility=hidden", "--split-compile=0")
_OLDEST = 80  # bfloat16 conversions


def wanted(spec: OpSpec) -> bool:
    """Whether the op has CUDA kernels, torch has CUDA, and there is a GPU, or one is named."""
    if spec.library is not None or os.environ.get("FUSEPORT_NATIVE") == "0":
        return False
    return torch.version.cuda is not None and spec.has("cuda.cpp") and bool(architectures())


def settled(spec: OpSpec) -> bool:
    """Whether a use of the op would compile nothing for CUDA."""
    try:
        return not wanted(spec) or cached(spec) is not None
    except BuildError:
        return True  # it cannot be compiled, and says so when it is used


def cached(spec: OpSpec) -> Path | None:
    """The library of the op's CUDA kernels if it need not be built; BuildError without nvcc."""
    return build.find(_library(spec))


def library_path(spec: OpSpec) -> Path:
    """The library of the op's CUDA kernels, built now if it is not in the cache.

    Raises:
        BuildError: they cannot be compiled; the message is one line, and says why.
    """
    return build.built(_library(spec))


def status(spec: OpSpec) -> Status:
    """What a call of the op on a GPU would find, where it is `wanted`; builds nothing."""
    try:
        return build.look(_library(spec))
    except BuildError as error:
        return Status("unavailable", str(error))


def load(spec: OpSpec) -> Path:
    """Loads the CUDA kernels of the op, compiled now if need be, after the op's own library.

    Raises:
        BuildError: they cannot be compiled or loaded; the message is one line, and says why.
    """
    path = library_path(spec)
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise BuildError(f"cannot load {path}: {error}") from error
    return path


def architectures() -> tuple[int, ...]:
    """Compute capabilities to compile for, ascending, as 10·major + minor: 90 of an H200.

    They are those that FUSEPORT_CUDA_ARCHITECTURES names, or of this machine's GPUs from 80 on.
    """
    if chosen := os.environ.get(ARCHITECTURES):
        if not re.fullmatch(r"\d+(;\d+)*", chosen):
            raise BuildError(f"{ARCHITECTURES} is {chosen!r}, and not like 80;90")
        return tuple(sorted({int(part) for part in chosen.split(";")}))
    return tuple(sorted({found for found in _present() if found >= _OLDEST}))


def nvcc() -> str:
    """The path of nvcc: that of NVCC, on PATH, or CUDA's usual one; BuildError if there is none."""
    if chosen := os.environ.get("NVCC"):
        if found := shutil.which(chosen):
            return found
        raise BuildError(f"NVCC names {chosen!r}, which is not a program on PATH")
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    if found := shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin"):
        return found
    raise BuildError(
        "there is no nvcc: install CUDA's compiler (Debian, Ubuntu: apt install cuda-nvcc from "
        "NVIDIA's repository; pip install nvidia-cuda-nvcc nvidia-cuda-cccl), or set NVCC"
    )


def compile_command(targets: Sequence[int]) -> list[str]:
    """nvcc and the flags for machine code of `targets`, and PTX of the last of them.

    Each target has code of its own; from PTX the driver makes that of GPUs newer than all of them.
    """
    code = [f"-gencode=arch=compute_{n},code=sm_{n}" for n in targets]
    ptx = f"-gencode=arch=compute_{targets[-1]},code=compute_{targets[-1]}"
    return [nvcc(), *_FLAGS, *code, ptx, f"-I{build.OPS_FOLDER}"]


def kernel_unit(source: Path, targets: Sequence[int]) -> Unit:
    """A source that nvcc compiles for `targets`."""
    return Unit(source, _FLAGS, command=lambda: compile_command(targets))


def runtime_folders() -> tuple[str, ...]:
    """Flags of the linker for the folders of CUDA's runtime, as nvcc itself links programs."""
    folders = _folders(nvcc(), "LIBRARIES", "-L")
    if not any((Path(folder) / "libcudart_static.a").is_file() for folder in folders):
        raise BuildError(
            f"CUDA's static runtime is not beside {nvcc()}: install it (Debian, Ubuntu: apt "
            "install cuda-cudart-dev from NVIDIA's repository; pip install nvidia-cuda-runtime)"
        )
    return tuple(f"-L{folder}" for folder in folders)


def for_these_gpus(name: str, make: Callable[[str, tuple[int, ...]], Library]) -> Library:
    """A library of kernels for what `architectures` says, or for more than that, if it is built.

    Without nvcc it is one in the cache that runs on these GPUs, if only by PTX of older ones.

    Args:
        name: what its file's name begins with, before what it is for.
        make: from a name and the targets.

    Raises:
        BuildError: there is no GPU, and none named; or neither nvcc nor such a library.
    """
    wanted = architectures()
    if not wanted:
        raise BuildError(
            f"there is no GPU of compute capability {_OLDEST / 10} or later here to compile "
            f"kernels for: set {ARCHITECTURES} to that of another, as 90 for an H200"
        )

    def library(targets: tuple[int, ...]) -> Library:
        return make(f"{name}-{'_'.join(map(str, targets))}", targets)

    kept = sorted(_kept(name), key=lambda targets: (-len({*targets} & {*wanted}), targets))
    try:
        nvcc()
    except BuildError:
        fitting = [targets for targets in kept if all(_runs(targets, gpu) for gpu in wanted)]
        found = next((made for made in map(library, fitting) if build.find(made)), None)
        if found is None:
            raise
        return found
    larger = [targets for targets in kept if {*wanted} < {*targets}]
    own = library(wanted)
    if not larger or build.find(own):
        return own
    return next((made for made in map(library, larger) if build.find(made)), own)


def _kept(name: str) -> Iterator[tuple[int, ...]]:
    """The targets of libraries in the cache."""
    found = build.cache_folder().glob(f"{name}-*.so")
    names = (re.fullmatch(rf"{name}-(\d+(?:_\d+)*)-\w+-\w+\.so", path.name) for path in found)
    for targets in {match[1] for match in names if match}:
        yield tuple(map(int, targets.split("_")))


def _runs(targets: tuple[int, ...], gpu: int) -> bool:
    """Whether a GPU runs code for one of `targets`, or the PTX of the last.

    Machine code runs on later minor versions of its major one, and PTX on all that is later: CUDA
    C++ Programming Guide, "Compute Capabilities" and "Just-in-Time Compilation".
    """
    return targets[-1] <= gpu or any(t <= gpu and t // 10 == gpu // 10 for t in targets)


def _library(spec: OpSpec) -> Library:
    _refuse_another_cuda()

    def headers() -> tuple[str, ...]:
        return tuple(f"-I{folder}" for folder in _folders(nvcc(), "INCLUDES", "-I"))

    def library(name: str, targets: tuple[int, ...]) -> Library:
        binding = build.torch_unit(spec.folder / "cuda.cpp", headers=headers)
        units = (binding, kernel_unit(spec.folder / "kernel.cu", targets))
        return Library(name, units, build.torch_link("c10_cuda"))

    return for_these_gpus(f"{spec.name}-cuda", library)


def _refuse_another_cuda() -> None:
    try:
        compiler = nvcc()
    except BuildError:
        return  # what is in the cache is of this torch, and so of its CUDA
    release = re.search(r"release (\d+)", build.compiler_version(shlex.quote(compiler)))
    ours, theirs = release and release[1], str(torch.version.cuda).split(".")[0]
    if ours != theirs:
        raise BuildError(f"{compiler} is of CUDA {ours}, and torch was built with CUDA {theirs}")


@functools.cache
def _folders(compiler: str, variable: str, flag: str) -> tuple[str, ...]:
    """The folders of CUDA's headers or libraries, as nvcc names them to a compiler or linker."""
    said = build.run_compiler([compiler, "--dryrun", "-x", "cu", "-c", os.devnull], errors=True)
    line = re.search(rf"^#\$ {variable}=(.*)$", said, re.MULTILINE)
    found = re.findall(rf'{flag}([^"\s]+)', line[1]) if line else []
    if not found:
        raise BuildError(f"{compiler} --dryrun names no folder in its {variable}")
    return tuple(str(Path(folder).resolve()) for folder in found)


@functools.cache
def _present() -> tuple[int, ...]:
    """Of this machine's GPUs, by NVML, which needs no CUDA context; none where that is not."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ()
    if nvml.nvmlInit_v2() != 0:
        return ()
    try:
        count = ctypes.c_uint()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        found = []
        for index in range(count.value):
            device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
            if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == 0 and (
                nvml.nvmlDeviceGetCudaComputeCapability(
                    device, ctypes.byref(major), ctypes.byref(minor)
                )
                == 0
            ):
                found.append(10 * major.value + minor.value)
        return tuple(found)
    finally:
        nvml.nvmlShutdown()
