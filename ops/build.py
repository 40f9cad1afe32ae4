"""Compiles, caches and loads the native library of an op: `<op>-<sources>-<compiler>.so`.

An op's folder has `torch.cpp`, compiled once, and `kernel.cpp`, compiled once for each instruction
set that the kernel may find at run time, so that one binary serves every machine of an
architecture. The library links libtorch_cpu and libc10, and no Python: a C++ host can dlopen it.

The file's name holds two hashes: one of the sources, the flags and torch's version, one of the
compiler. It is written under another name first, behind a lock, so it is never seen half done.
"""

import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from filelock import FileLock

from fuseport.ops.spec import OpSpec

__all__ = ["BuildError", "Status", "cache_folder", "cached", "library_path", "load", "status"]

_OPS = Path(__file__).parent
_FLAGS = (
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",  # with the next one: comparisons and conversions become vector code; unlike
    "-fno-trapping-math",  # -ffast-math, both leave NaN, Inf and the order of sums alone
    f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
)
_X86: dict[str, tuple[str, ...]] = {
    "baseline": (),
    "avx2": ("-mavx2", "-mfma"),
    "avx512": ("-mavx512f", "-mavx512vl", "-mavx512dq", "-mavx512bw", "-mfma"),
}
_VARIANTS = _X86 if platform.machine().lower() in ("x86_64", "amd64") else {"baseline": ()}


class BuildError(Exception):
    """A native library cannot be built or loaded; the message is one line, and says why."""


@dataclass(frozen=True)
class Status:
    """Whether an op's library is there: `built`, `buildable` on first use, or `unavailable`."""

    state: Literal["built", "buildable", "unavailable"]
    detail: str


def cache_folder() -> Path:
    """Where libraries are kept: FUSEPORT_CACHE, or `fuseport` in the user's cache folder."""
    if chosen := os.environ.get("FUSEPORT_CACHE"):
        return Path(chosen)
    home = "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path(home).expanduser()) / "fuseport"


def cached(spec: OpSpec) -> Path | None:
    """The op's library if it need not be built; None if it must be.

    Where there is no compiler, a library of the same sources that any compiler built is right.
    """
    candidates = sorted(cache_folder().glob(f"{spec.name}-{_source_key(spec)}-*.so"))
    if not candidates:
        return None
    try:
        wanted = _target(spec, _compiler())
    except BuildError:
        return candidates[0]
    return wanted if wanted in candidates else None


def library_path(spec: OpSpec) -> Path:
    """The op's library, built now if it is not in the cache; BuildError if it cannot be."""
    if found := cached(spec):
        return found
    compiler = _compiler()
    target = _target(spec, compiler)
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with FileLock(target.parent / f"{spec.name}.lock"):
            if not target.exists():  # another process may have built it meanwhile
                _build(spec, compiler, target)
    except OSError as error:
        raise BuildError(f"cannot write to {target.parent}: {error}") from error
    return target


def load(spec: OpSpec) -> Path:
    """Loads the op's library into this process, which registers its operators."""
    path = library_path(spec)
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise BuildError(f"cannot load {path}: {error}") from error
    return path


def status(spec: OpSpec) -> Status:
    """What a call of the op would find; builds nothing."""
    try:
        if found := cached(spec):
            return Status("built", str(found))
        return Status("buildable", f"with {shlex.join(_compiler())}, on first use")
    except BuildError as error:
        return Status("unavailable", str(error))


def _sources(spec: OpSpec) -> Iterator[Path]:
    for folder in (_OPS / "native", spec.folder):
        yield from sorted(p for p in folder.iterdir() if p.suffix in (".cpp", ".hpp"))


def _source_key(spec: OpSpec) -> str:
    digest = hashlib.sha256()
    for part in (torch.__version__, platform.system(), platform.machine(), *_FLAGS, str(_VARIANTS)):
        digest.update(part.encode() + b"\0")
    for path in _sources(spec):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _target(spec: OpSpec, compiler: list[str]) -> Path:
    version = _version(shlex.join(compiler))
    key = hashlib.sha256(f"{shlex.join(compiler)}\0{version}".encode()).hexdigest()[:8]
    return cache_folder() / f"{spec.name}-{_source_key(spec)}-{key}.so"


def _compiler() -> list[str]:
    if chosen := os.environ.get("CXX"):
        command = shlex.split(chosen)
        if command and shutil.which(command[0]):
            return command
        raise BuildError(f"CXX names {chosen!r}, which is not a program on PATH")
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise BuildError(
        "there is no C++ compiler: install g++ or clang++ (Debian, Ubuntu: apt install g++; "
        "macOS: xcode-select --install), or set CXX"
    )


@functools.cache
def _version(compiler: str) -> str:
    return _run([*shlex.split(compiler), "--version"])


def _build(spec: OpSpec, compiler: list[str], target: Path) -> None:
    torch_folder = Path(torch.__file__).parent
    headers = torch_folder / "include"
    include = (f"-I{headers}", f"-I{headers / 'torch/csrc/api/include'}")
    units: list[tuple[str, str, tuple[str, ...]]] = [("torch", "torch.cpp", include)]
    for variant, flags in _VARIANTS.items():
        units.append((variant, "kernel.cpp", (f"-DFUSEPORT_ISA={variant}", *flags)))
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{spec.name}-") as scratch:
        objects = [f"{scratch}/{name}.o" for name, _, _ in units]
        for (_, name, flags), compiled in zip(units, objects, strict=True):
            source = str(spec.folder / name)
            _run([*compiler, *_FLAGS, f"-I{_OPS}", *flags, "-c", source, "-o", compiled])
        built = f"{scratch}/library.so"
        _run([*compiler, *objects, *_link_flags(torch_folder / "lib"), "-o", built])
        os.replace(built, target)


def _link_flags(lib: Path) -> list[str]:
    flags = ["-shared", f"-L{lib}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{lib}"]
    # Symbols of OpenMP come from the runtime that torch has loaded: native/parallel.hpp.
    return [*flags, "-Wl,-undefined,dynamic_lookup"] if sys.platform == "darwin" else flags


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = " / ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        raise BuildError(f"{command[0]} failed (exit {done.returncode}): {reason}")
    return done.stdout
