"""Compiles, caches and loads native libraries: `<name>-<sources>-<compiler>.so`.

The library of an op for torch is made of its `torch.cpp`, compiled once, its `kernel.cpp`, compiled
once for each instruction set that the kernel may find at run time, so that one binary serves every
machine of an architecture, and `native/autograd.cpp`, compiled once for all ops. It links
libtorch_cpu and libc10, and no Python: a C++ host can dlopen it. `ops.ort` has the library for ONNX
Runtime.

A file's name holds two hashes: one of the sources that go into it, the flags and torch's version,
one of the compiler. So does that of an object file, which is kept in `objects`: libraries share the
kernels that both have. A file is written under another name first, and synced to disk, and a
library behind a lock, so it is never seen half done.
"""

import fcntl
import functools
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from filelock import FileLock

from fuseport.ops.spec import NAMESPACE, OpSpec

__all__ = [
    "OPS_FOLDER",
    "VARIANTS",
    "BuildError",
    "Library",
    "Status",
    "Unit",
    "built",
    "cache_folder",
    "cached",
    "compiler_command",
    "compiler_version",
    "find",
    "kernel_units",
    "library_path",
    "load",
    "look",
    "run_compiler",
    "staged",
    "status",
    "together",
    "torch_link",
    "torch_unit",
]

OPS_FOLDER = Path(__file__).parent
_TORCH = Path(torch.__file__).parent
_FLAGS = (
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",  # with the next one: comparisons and conversions become vector code; unlike
    "-fno-trapping-math",  # -ffast-math, both leave NaN, Inf and the order of sums alone
)
_X86: dict[str, tuple[str, ...]] = {
    "baseline": (),
    "avx2": ("-mavx2", "-mfma"),
    "avx512": ("-mavx512f", "-mavx512vl", "-mavx512dq", "-mavx512bw", "-mfma"),
}
VARIANTS = _X86 if platform.machine().lower() in ("x86_64", "amd64") else {"baseline": ()}

_AUTOGRAD = "native/autograd"
_OBJECTS = "objects"
_log = logging.getLogger(NAMESPACE)
_STAGING = ".staging-"
_being_made: dict[Path, threading.Lock] = {}
_processors = threading.BoundedSemaphore(os.cpu_count() or 1)  # one compiler's process for each


class BuildError(Exception):
    """A native library cannot be built or loaded; the message is one line, and says why."""


def _none() -> Sequence[str]:
    return ()


@dataclass(frozen=True)
class Unit:
    """A source that is compiled once.

    Attributes:
        source: the file; its includes in quotes are relative to the folder of ops, or to that which
            the op's own folder is in.
        flags: beyond those of all sources.
        include: the flags that name folders of other headers; BuildError if those are not here.
        version: of those headers: of torch.
        command: of another compiler than the one of C++, with its flags.
    """

    source: Path
    flags: tuple[str, ...] = ()
    include: Callable[[], Sequence[str]] = _none
    version: str = ""
    command: Callable[[], Sequence[str]] | None = None


@dataclass(frozen=True)
class Library:
    """What a native library is built from.

    Attributes:
        name: what its file's name begins with.
        units: its sources.
        link: flags of the linker.
        folders: those flags that name folders of libraries; BuildError if these are not here.
    """

    name: str
    units: tuple[Unit, ...]
    link: tuple[str, ...] = ()
    folders: Callable[[], Sequence[str]] = _none


@dataclass(frozen=True)
class Status:
    """Whether a library is there: `built`, `buildable` on first use, or `unavailable`."""

    state: Literal["built", "buildable", "unavailable"]
    detail: str


def cache_folder() -> Path:
    """Where libraries are kept: FUSEPORT_CACHE, or `fuseport` in the user's cache folder."""
    if chosen := os.environ.get("FUSEPORT_CACHE"):
        return Path(chosen)
    home = "~/Library/Caches" if sys.platform == "darwin" else "~/.cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path(home).expanduser()) / "fuseport"


def find(library: Library) -> Path | None:
    """The library if it need not be built; None if it must be.

    Where a compiler is missing, a library of the same sources that any compilers built is right.
    """
    candidates = sorted(
        cache_folder().glob(f"{library.name}-{_source_key(library.units, library.link)}-*.so")
    )
    if not candidates:
        return None
    try:
        wanted = _target(library, compiler_command())
    except BuildError:
        return candidates[0]
    return wanted if wanted in candidates else None


def built(library: Library) -> Path:
    """The library, built now if it is not in the cache; BuildError if it cannot be."""
    for folder in (cache_folder(), cache_folder() / _OBJECTS):
        _remove_abandoned(folder)
    if found := find(library):
        return found
    compiler = compiler_command()
    target = _target(library, compiler)
    # Whoever chose the folder may be another than those who run: the maker of a container's image.
    mode = 0o755 if os.environ.get("FUSEPORT_CACHE") else 0o700
    try:
        target.parent.mkdir(mode, parents=True, exist_ok=True)
        with FileLock(target.parent / f"{library.name}.lock"):
            if not target.exists():  # another process may have built it meanwhile
                _build(library, compiler, target)
    except OSError as error:
        raise BuildError(f"cannot write to {target.parent}: {error}") from error
    return target


def together(builds: Iterable[Callable[[], Path]]) -> None:
    """Build several libraries at once, as many files at a time as there are processors.

    What cannot be built is no error here: whoever needs it is told.
    """

    def done(build: Callable[[], Path]) -> None:
        with suppress(BuildError):
            build()

    wanted = list(builds)
    with ThreadPoolExecutor(max(1, len(wanted))) as pool:
        for _ in pool.map(done, wanted):
            pass


def look(library: Library) -> Status:
    """What a use of the library would find; builds nothing."""
    try:
        if found := find(library):
            return Status("built", str(found))
        for needed in (*(unit.include for unit in library.units), library.folders):
            needed()
        return Status("buildable", f"with {shlex.join(compiler_command())}, on first use")
    except BuildError as error:
        return Status("unavailable", str(error))


def cached(spec: OpSpec) -> Path | None:
    """The op's library for torch if it need not be built; see `find`."""
    if spec.library is not None:
        return spec.library
    return find(_for_torch(spec))


def library_path(spec: OpSpec) -> Path:
    """The op's library for torch, built now if need be; BuildError if it cannot be."""
    if spec.library is not None:
        if not spec.library.is_file():
            raise BuildError(f"there is no library {spec.library}")
        return spec.library
    if not spec.has("torch.cpp"):
        raise BuildError(f"the op {spec.name} has no torch.cpp and no library")
    return built(_for_torch(spec))


def load(spec: OpSpec) -> Path:
    """Loads the op's library into this process, which registers its operators with torch."""
    path = library_path(spec)
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise BuildError(f"cannot load {path}: {error}") from error
    return path


def status(spec: OpSpec) -> Status:
    """What a call of the op in torch would find; builds nothing."""
    if spec.library is not None:
        there = spec.library.is_file()
        return Status("built" if there else "unavailable", str(spec.library))
    return look(_for_torch(spec))


def kernel_units(spec: OpSpec) -> tuple[Unit, ...]:
    """The op's kernels, once for each instruction set; none where all is in its binding."""
    return tuple(
        Unit(spec.folder / "kernel.cpp", (f"-DFUSEPORT_ISA={variant}", *flags))
        for variant, flags in VARIANTS.items()
        if spec.has("kernel.cpp")
    )


def torch_unit(
    source: Path,
    flags: tuple[str, ...] = (),
    headers: Callable[[], Sequence[str]] = _none,
) -> Unit:
    """A binding to torch, with the flags that it is compiled with, and those of other headers."""
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    include = (
        f"-I{_TORCH / 'include'}",
        f"-I{_TORCH / 'include/torch/csrc/api/include'}",
        f"-ffile-prefix-map={_TORCH}=torch",
    )
    return Unit(source, (abi, *flags), lambda: (*include, *headers()), torch.__version__)


def torch_link(*libraries: str) -> tuple[str, ...]:
    """Flags of the linker for a library of bindings to torch, and torch's `libraries`."""
    lib = _TORCH / "lib"
    link = (f"-L{lib}", "-ltorch_cpu", "-lc10", *(f"-l{name}" for name in libraries))
    if sys.platform == "darwin":
        # Symbols of OpenMP come from the runtime that torch has loaded: native/parallel.hpp.
        return (*link, f"-Wl,-rpath,{lib}", "-Wl,-undefined,dynamic_lookup")
    # Elsewhere no rpath: whoever opens the library has loaded libtorch, wherever that lies.
    return link


def _for_torch(spec: OpSpec) -> Library:
    units = (torch_unit(spec.folder / "torch.cpp"), *kernel_units(spec))
    if f"{_AUTOGRAD}.hpp" in _sources(units):
        units = (*units, torch_unit(OPS_FOLDER / f"{_AUTOGRAD}.cpp"))
    return Library(spec.name, units, torch_link())


def _sources(units: Sequence[Unit]) -> dict[str, bytes]:
    """The text of each unit and of all that they include of this package, by path."""
    found: dict[Path, bytes] = {}
    roots = _roots(units)
    waiting = [unit.source for unit in units]
    while waiting:
        path = waiting.pop()
        if path not in found and path.is_file():  # of one that is absent, the compiler tells
            found[path] = path.read_bytes()
            names = re.findall(rb'^#include "([^"]+)"', found[path], re.MULTILINE)
            waiting += [root / name.decode() for name in names for root in roots]
    return {_relative(path, roots): text for path, text in sorted(found.items())}


def _roots(units: Sequence[Unit]) -> tuple[Path, ...]:
    """The folders that folders of ops are in: this package's, and those of a user's own ops."""
    others = (unit.source.parent.parent for unit in units)
    return tuple(dict.fromkeys((OPS_FOLDER, *others)))


def _relative(path: Path, roots: tuple[Path, ...]) -> str:
    root = next((root for root in roots if path.is_relative_to(root)), path.parent)
    return path.relative_to(root).as_posix()


def _source_key(units: Sequence[Unit], link: Sequence[str] = ()) -> str:
    digest = hashlib.sha256()
    flags = (*_FLAGS, *(str((u.source.name, u.flags, u.version)) for u in units))
    kept = (flag for flag in link if not flag.startswith("-L"))
    for part in (platform.system(), platform.machine(), *flags, *kept):
        digest.update(part.encode() + b"\0")
    for name, text in _sources(units).items():
        digest.update(name.encode() + b"\0" + text + b"\0")
    return digest.hexdigest()[:16]


def _compiler_key(compiler: Sequence[str], units: Sequence[Unit]) -> str:
    """A hash of what the C++ compiler and those that units name are, with flags of the latter."""
    said = f"{shlex.join(compiler)}\0{compiler_version(shlex.join(compiler))}"
    for command in dict.fromkeys(tuple(unit.command()) for unit in units if unit.command):
        flags = (flag for flag in command if not flag.startswith("-I"))
        said += f"\0{shlex.join(flags)}\0{compiler_version(shlex.quote(command[0]))}"
    return hashlib.sha256(said.encode()).hexdigest()[:8]


def _target(library: Library, compiler: list[str]) -> Path:
    key = _source_key(library.units, library.link)
    return cache_folder() / f"{library.name}-{key}-{_compiler_key(compiler, library.units)}.so"


def compiler_command() -> list[str]:
    """The C++ compiler: that of CXX, or the first that is here; BuildError if there is none."""
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
def compiler_version(compiler: str) -> str:
    """What the compiler says of itself."""
    return run_compiler([*shlex.split(compiler), "--version"])


def announce(what: str) -> None:
    """Say that something is compiled now, to whoever wonders why it takes so long.

    Where nobody has asked for what is logged, as the commands do, it is a warning, which Python
    prints.
    """
    level = logging.INFO if _log.isEnabledFor(logging.INFO) else logging.WARNING
    _log.log(level, "compiling %s: once on this machine, it takes a minute or so", what)


def _build(library: Library, compiler: list[str], target: Path) -> None:
    announce(f"{library.name}'s kernels")
    with ThreadPoolExecutor(len(library.units)) as pool:
        objects = list(pool.map(lambda unit: _object(unit, library, compiler), library.units))
    with staged(target) as linked:
        link = (*library.folders(), *library.link)
        run_compiler([*compiler, "-shared", *map(str, objects), *link, "-o", str(linked)])


def _object(unit: Unit, library: Library, compiler: list[str]) -> Path:
    """The compiled unit, from the cache if it is there."""
    others = _roots(library.units)  # of a user's own ops that include each other's headers
    key = f"{_source_key([unit])}-{_compiler_key(compiler, [unit])}"
    target = cache_folder() / _OBJECTS / f"{unit.source.parent.name}-{unit.source.stem}-{key}.o"
    target.parent.mkdir(mode=0o700, exist_ok=True)
    # Libraries that are built at once may have units in common.
    with _being_made.setdefault(target, threading.Lock()):
        if not target.exists():
            _compile(unit, others, compiler, target)
    return target


def _compile(unit: Unit, others: Sequence[Path], compiler: list[str], target: Path) -> None:
    # Messages name no folder of this machine, for a library may go into a bundle.
    private = (f"-ffile-prefix-map={root}=ops" for root in others)
    include = (*(f"-I{root}" for root in others), *unit.include())
    with staged(target) as compiled:
        command = (
            [*compiler, *_FLAGS, *private, *include, *unit.flags]
            if unit.command is None
            else list(unit.command())
        )
        with _processors:
            run_compiler([*command, "-c", str(unit.source), "-o", str(compiled)])


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A file beside `target`, which takes its place when all went well.

    If the body raises, or the process dies, `target` stays as it was.
    """
    scratch, lock = _scratch(target)
    try:
        made = scratch / target.name
        yield made
        _sync(made)
        os.replace(made, target)
        _sync(target.parent)
    finally:
        _remove(scratch)
        os.close(lock)


def _scratch(target: Path) -> tuple[Path, int]:
    """A new folder, and an open descriptor that locks it while this process lives."""
    while True:
        folder = Path(tempfile.mkdtemp(dir=target.parent, prefix=f"{target.stem}{_STAGING}"))
        # Until it is locked, another process may take it for abandoned and remove it: then again.
        try:
            lock = _lock(folder)
        except OSError:
            _remove(folder)
            raise
        if lock is not None:
            if folder.exists():
                return folder, lock
            os.close(lock)


def _remove_abandoned(parent: Path) -> None:
    """Delete what `staged` left there when its process was killed: nobody holds its lock."""
    with suppress(OSError):  # what cannot be removed now is in nobody's way
        for folder in parent.glob(f"*{_STAGING}*"):
            if (lock := _lock(folder)) is not None:
                _remove(folder)
                os.close(lock)


def _remove(folder: Path) -> None:
    """Delete a folder; tried again once, since a system call may fail for a moment."""
    for _ in range(2):
        shutil.rmtree(folder, ignore_errors=True)


def _lock(folder: Path) -> int | None:
    """The descriptor that locks a folder; None if it is gone, or another process is at it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return descriptor


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def run_compiler(command: list[str], errors: bool = False) -> str:
    """What a compiler prints, or prints as errors; BuildError, with their end, if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = " / ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        raise BuildError(f"{command[0]} failed (exit {done.returncode}): {reason}")
    return done.stderr if errors else done.stdout
