"""The fused kernels inside ONNX Runtime: one library of custom ops, for all ops that have one.

An op takes part by an `ort.cpp` in its folder; a node of an op without one runs its function body.
It is one library, since ONNX Runtime takes custom ops of a domain from one library only ("Domain
already set in registry"). It is built as the libraries for torch are, and needs ONNX Runtime's C
headers, which its wheels do not have. Which version they are of does not matter: native/ort.hpp.

Sessions of the CUDA provider register another library in its place, in which ops take part by an
`ort_cuda.cpp` and the `kernel.cu` that is also in their libraries for torch. CUDA's runtime is
inside it, so that it serves programs that have ONNX Runtime and a driver alone: streams and memory
are the driver's, and all runtimes in a process have one context of a device.
"""

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from fuseport.ops import build, cuda
from fuseport.ops.build import BuildError, Library, Status, Unit
from fuseport.ops.onnx_bodies import DOMAIN
from fuseport.ops.spec import OpSpec

__all__ = ["DOMAIN", "HEADERS", "bound", "calls", "headers", "library", "status"]

HEADERS = "FUSEPORT_ONNXRUNTIME_HEADERS"
"""The environment variable that names the folder of ONNX Runtime's C headers."""

_BINDINGS = {"cpu": "ort.cpp", "cuda": "ort_cuda.cpp"}
_CUDA_RUNTIME = ("-lcudart_static", "-lrt", "-lpthread", "-ldl")
_HEADER = "onnxruntime_c_api.h"
_NO_HEADERS = (
    f"ONNX Runtime's C headers are not here, and its wheels have none: apt install "
    f"libonnxruntime-dev (Debian from trixie on), or unpack onnxruntime-linux-x64-*.tgz from "
    f"github.com/microsoft/onnxruntime/releases and set {HEADERS} to its include folder"
)


def library(specs: Iterable[OpSpec], device: str = "cpu") -> Path:
    """The library with the kernels of these ops, built now if it is not in the cache.

    Args:
        specs: of the ops; those that are not `bound` on the device have no part in it.
        device: `cpu` or `cuda`: whose execution provider has the kernels.

    Raises:
        BuildError: it cannot be built; the message says what is missing and how to get it.
    """
    _refuse_if_unwanted()
    return build.built(_library(specs, device))


def status(specs: Iterable[OpSpec], device: str = "cpu") -> Status:
    """What a use of the library would find; builds nothing."""
    try:
        _refuse_if_unwanted()
        return build.look(_library(specs, device))
    except BuildError as error:
        return Status("unavailable", str(error))


def bound(spec: OpSpec, device: str = "cpu") -> bool:
    """Whether the library of a device has kernels of the op, for all of its nodes."""
    return spec.has(_BINDINGS[device])


def headers() -> Path:
    """The folder of ONNX Runtime's C headers.

    It is the one that FUSEPORT_ONNXRUNTIME_HEADERS names; else the first that has them of this
    Python environment's, that of pkg-config and the system's.

    Raises:
        BuildError: they are not there; the message says how to get them.
    """
    if chosen := os.environ.get(HEADERS):
        if (Path(chosen) / _HEADER).is_file():
            return Path(chosen).resolve()
        raise BuildError(f"{HEADERS} names {chosen}, which has no {_HEADER}")
    found = next((folder for folder in _folders() if (folder / _HEADER).is_file()), None)
    if found is None:
        raise BuildError(_NO_HEADERS)
    return found


def calls(path: Path, op: str) -> int | None:
    """How often the library's kernels of an op have run in this process; None if it has none.

    Args:
        path: of the library, which sessions of this process use.
        op: the type of a node of domain `fuseport.ops`.
    """
    count = ctypes.CDLL(str(path)).fuseport_calls
    count.restype = ctypes.c_int64
    count.argtypes = [ctypes.c_char_p]
    found = int(count(op.encode()))
    return None if found < 0 else found


def _refuse_if_unwanted() -> None:
    if os.environ.get("FUSEPORT_NATIVE") == "0":
        raise BuildError("FUSEPORT_NATIVE=0 asks for no native kernels: unset it")


def _library(specs: Iterable[OpSpec], device: str = "cpu") -> Library:
    native = build.OPS_FOLDER / "native"
    units = [_binding(native / "ort.cpp")]
    taking_part = [spec for spec in specs if bound(spec, device)]
    units += [_binding(spec.folder / _BINDINGS[device]) for spec in taking_part]
    if device == "cpu":
        units += [unit for spec in taking_part for unit in build.kernel_units(spec)]
        return Library("onnxruntime", tuple(units))
    sources = (native / "memory.cu", *(spec.folder / "kernel.cu" for spec in taking_part))

    def of_kernels(name: str, targets: tuple[int, ...]) -> Library:
        kernels = (cuda.kernel_unit(source, targets) for source in sources)
        return Library(name, (*units, *kernels), _CUDA_RUNTIME, cuda.runtime_folders)

    return cuda.for_these_gpus("onnxruntime-cuda", of_kernels)


def _binding(source: Path) -> Unit:
    return Unit(source, include=_include)


def _include() -> tuple[str, ...]:
    return (f"-I{headers()}",)


def _folders() -> Iterator[Path]:
    """Where the headers may be, the nearest first."""
    yield from _within(Path(sys.prefix) / "include")  # conda puts them here
    if program := shutil.which("pkg-config"):
        command = [program, "--cflags-only-I", "libonnxruntime"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        yield from (Path(flag.removeprefix("-I")) for flag in done.stdout.split())
    for root in ("/usr/local/include", "/usr/include", "/opt/homebrew/include"):
        yield from _within(Path(root))


def _within(root: Path) -> Iterator[Path]:
    yield from (root / "onnxruntime", root / "onnxruntime/core/session", root)
