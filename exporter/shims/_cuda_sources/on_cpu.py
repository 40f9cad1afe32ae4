"""An extension's CUDA sources, run on the CPU, on small tensors: to learn what they compute.

They are compiled as C++ behind `on_cpu.hpp`, and called in a process of their own, which what they
read beyond their tensors cannot harm.
"""

import re
import struct
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path

import torch
from torch import Tensor

from fuseport.ops import build

__all__ = ["Failed", "Sources"]

_SECONDS = 60  # that a call may take; it takes a few milliseconds
_HEADER = Path(__file__).with_name("on_cpu.hpp")
_THEIRS = re.compile(
    r'^[ \t]*#[ \t]*include[ \t]*[<"](?:ATen|c10|torch|THC|pybind11|cuda|device_)[^\n]*',
    re.MULTILINE,
)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_LAUNCH = re.compile(r"(\w+(?:\s*<[\w\s,:]*>)?)\s*<<<(.*?)>>>\s*\(", re.DOTALL)
_LOOP = re.compile(r"\bfor\s*\([^{};]*;[^{};]*;[^{};]*\)\s*(?=\{)")
_FUNCTION = re.compile(r"\b(\w+)\s*\(([^(){};]*\bTensor\b[^(){};]*)\)\s*\{")
_BOUND = re.compile(r'\bm\s*\.\s*(?:def|impl)\s*\(\s*"(\w+)"\s*,\s*&?\s*(\w+)')
_LIBRARY = re.compile(r"\bTORCH_LIBRARY\s*\(\s*(\w+)\s*,")


class Failed(Exception):
    """The sources do not compile on a CPU, or a call of them ends otherwise than with results."""


class Sources:
    """The sources of an extension.

    Args:
        paths: of the files, as code gives them to the compiler.
        defined: macros and their values, which the compiler is given.
    """

    def __init__(self, paths: Sequence[str | Path], defined: Mapping[str, str]) -> None:
        self._folders = tuple(dict.fromkeys(str(Path(path).resolve().parent) for path in paths))
        texts = [_COMMENT.sub(" ", Path(path).read_text(errors="replace")) for path in paths]
        self._text = "\n".join(sorted(texts, key=lambda text: "__global__" not in text))
        self._defined = tuple(sorted(defined.items()))
        self._names = ", ".join(Path(path).name for path in paths)

    def __str__(self) -> str:
        return self._names

    @property
    def libraries(self) -> tuple[str, ...]:
        """The namespaces of operators that are registered."""
        return tuple(dict.fromkeys(_LIBRARY.findall(self._text)))

    @cached_property
    def functions(self) -> dict[str, tuple[str, ...]]:
        """The functions that are bound, with the names of their parameters."""
        found = {
            name: tuple(part.split()[-1].strip("&*") for part in parameters.split(","))
            for name, parameters in _FUNCTION.findall(self._text)
        }
        return {name: found[of] for name, of in _BOUND.findall(self._text) if of in found}

    def call(self, name: str, args: Sequence[int | Tensor]) -> list[tuple[Tensor, torch.dtype]]:
        """What a function makes of its arguments: all tensors that it was given, then those that it
        returns, in float64 and one dimension; and what their numbers are to it.

        Raises:
            Failed: see there.
        """
        program = _program(self._text, self._folders, self._defined)
        with tempfile.TemporaryDirectory() as folder:
            given, made = Path(folder, "given"), Path(folder, "made")
            given.write_bytes(b"".join(map(_written, args)))
            command = [str(program), name, str(given), str(made)]
            try:
                ended = subprocess.run(command, capture_output=True, timeout=_SECONDS, check=False)
            except subprocess.TimeoutExpired:
                raise Failed(f"it ran for more than {_SECONDS} s") from None
            if ended.returncode:
                said = ended.stderr.decode(errors="replace").strip().splitlines()
                raise Failed(said[-1] if said else f"it ended with {ended.returncode}")
            return _read(made.read_bytes())


def _written(arg: int | Tensor) -> bytes:
    if not isinstance(arg, Tensor):
        return struct.pack("d", arg)
    numbers = [arg.dim(), *arg.shape, *arg.double().flatten().tolist()]
    return struct.pack(f"{len(numbers)}d", *numbers)


def _read(data: bytes) -> list[tuple[Tensor, torch.dtype]]:
    found, at = [], 0
    while at < len(data):
        kind = data[at : at + 16].rstrip(b"\0").decode()
        count = int(struct.unpack_from("d", data, at + 16)[0])
        values = struct.unpack_from(f"{count}d", data, at + 24)
        dtype: torch.dtype = getattr(torch, kind) if kind else torch.float32
        found.append((torch.tensor(values, dtype=torch.float64), dtype))
        at += 24 + 8 * count
    return found


_folder: tempfile.TemporaryDirectory[str] | None = None


@cache
def _program(text: str, folders: tuple[str, ...], defined: tuple[tuple[str, str], ...]) -> Path:
    """The program that calls them, for as long as this process runs."""
    global _folder
    if _folder is None:
        _folder = tempfile.TemporaryDirectory(prefix="fuseport-sources-")
    source = Path(tempfile.mkdtemp(dir=_folder.name), "sources.cpp")
    main = "int main(int argc, char** argv) { return main_of(argc, argv); }"
    source.write_text(f'#include "{_HEADER}"\n{_launching(_met(_THEIRS.sub("", text)))}\n{main}\n')
    try:
        command = [*build.compiler_command(), "-std=c++17", "-O0", "-w", "-fno-strict-aliasing"]
        command += [f"-I{folder}" for folder in folders]
        command += [f"-D{name}={value}" if value else f"-D{name}" for name, value in defined]
        build.run_compiler([*command, str(source), "-o", str(source.with_suffix(""))])
    except build.BuildError as error:
        raise Failed(f"it does not compile on a CPU: {error}") from error
    return source.with_suffix("")


def _met(text: str) -> str:
    """With barriers around loops that ask other lanes: lanes leave a loop together on GPUs, however
    often each goes through it, and what they ask for changes afterwards."""
    parts, at = [], 0
    for found in _LOOP.finditer(text):
        if found.start() < at:
            continue
        end = _closing(text, text.find("{", found.end()) + 1, "{}")
        if "__shfl_sync" in text[found.start() : end]:
            barrier = "__syncthreads();"
            parts += [text[at : found.start()], barrier, text[found.start() : end], barrier]
            at = end
    return "".join([*parts, text[at:]])


def _closing(text: str, at: int, pair: str) -> int:
    """The place behind what closes what is open at a place."""
    depth = 1
    while depth and at < len(text):
        depth += (text[at] == pair[0]) - (text[at] == pair[1])
        at += 1
    return at


def _launching(text: str) -> str:
    """Launches as calls: `k<<<grid, block>>>(x)` as `Launch(grid, block).run([&] { k(x); })`."""
    parts, at = [], 0
    while found := _LAUNCH.search(text, at):
        end = _closing(text, found.end(), "()")
        arguments = text[found.end() : end - 1]
        parts.append(text[at : found.start()])
        parts.append(f"fuseport::Launch({found[2]}).run([&] {{ {found[1]}({arguments}); }})")
        at = end
    return "".join([*parts, text[at:]])
