"""The C++ host: builds it from `host/main.cpp`, once, and talks to its process.

It is compiled as the ops' libraries are, with the same compiler and into the same cache folder, and
links libtorch_cpu and libc10 alone: torch's CMake package would want the CUDA toolkit wherever
torch is built for CUDA. On a GPU it opens libtorch_cuda before the ops' libraries.
"""

import hashlib
import io
import os
import platform
import shlex
import subprocess
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from filelock import FileLock
from torch import Tensor

from fuseport.exporter.bundle.libraries import find
from fuseport.exporter.child import ending
from fuseport.exporter.runtimes import Unsupported, _ops
from fuseport.exporter.runtimes._device import device_of
from fuseport.exporter.runtimes._reason import telling_line
from fuseport.ops import build
from fuseport.ops.build import BuildError

__all__ = ["Host", "HostSession", "binary", "missing", "prepare"]

_SOURCE = Path(__file__).parent / "host" / "main.cpp"
_TORCH = Path(torch.__file__).parent
_FLAGS = (
    "-std=c++20",
    "-O1",
    f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
    f"-I{_TORCH / 'include'}",
    f"-I{_TORCH / 'include/torch/csrc/api/include'}",
)
_LINK = (f"-L{_TORCH / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{_TORCH / 'lib'}", "-ldl")


def missing() -> str | None:
    """What the host cannot be built without, and how to get it."""
    if not (_TORCH / "include/torch/script.h").is_file():
        return f"{_TORCH} has no C++ headers: install torch from its wheel"
    try:
        build.compiler_command()
    except BuildError as error:
        return str(error)
    return None


def prepare(program: Mapping[str, Any]) -> None:
    """Have the host and the libraries of ops compiled; see `runtimes.Runtime`."""
    _ops.prepare(program)
    with suppress(BuildError):
        binary()


def binary() -> Path:
    """The host's executable, built now if it is not in the cache; BuildError if it cannot be."""
    target = _target()
    if target.exists():
        return target
    compiler = build.compiler_command()
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with FileLock(target.parent / "host.lock"):
            if not target.exists():  # another process may have built it meanwhile
                build.announce("the C++ host")
                with build.staged(target) as made:
                    command = [*compiler, *_FLAGS, str(_SOURCE), *_LINK, "-o", str(made)]
                    build.run_compiler(command)
    except OSError as error:
        raise BuildError(f"cannot write to {target.parent}: {error}") from error
    return target


class HostSession:
    """A session on an artifact in a host, which is started anew if it has died.

    Args:
        format_name: see `Host`.
        artifact: see `Host`.
        program: what the manifest says of it.

    Raises:
        Unsupported: the library of an op is not in the bundle, and cannot be built; or an op has
            no kernel for the device.
        RuntimeError: as `Host`.
    """

    def __init__(self, format_name: str, artifact: Path, program: Mapping[str, Any]) -> None:
        device = device_of(program).type
        try:
            libraries = find(artifact, program.get("ops", ()), device)
        except BuildError as error:
            raise Unsupported(f"without the ops' libraries: {error}") from error
        if device == "cuda":
            libraries.insert(0, _TORCH / "lib/libtorch_cuda.so")
        self._start = partial(Host, format_name, artifact, libraries, device)
        self._outputs = [spec["name"] for spec in program["outputs"]]
        self._host = self._start()
        self.seconds: float | None = None  # of the last call itself, without the way there and back

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The program's outputs by name."""
        outputs, _, self.seconds = self._ask("run", inputs, {})
        return dict(outputs)

    def differentiate(
        self, inputs: Mapping[str, Tensor], cotangents: Mapping[str, Tensor]
    ) -> dict[str, Tensor | None]:
        """Outputs, and `grad/<name>` of each floating input and each trainable parameter."""
        outputs, gradients, self.seconds = self._ask("differentiate", inputs, cotangents)
        return {**dict(outputs), **{f"grad/{name}": value for name, value in gradients}}

    def _ask(
        self, what: str, inputs: Mapping[str, Tensor], cotangents: Mapping[str, Tensor]
    ) -> Any:
        if self._host.ended():
            self._host = self._start()
        tensors = {"inputs": dict(inputs), "cotangents": dict(cotangents)}
        return self._host.ask(what, {**tensors, "outputs": self._outputs})


def _target() -> Path:
    """Named after all that it is made from, the folder of the torch that it links included."""
    compiler = shlex.join(build.compiler_command())
    made_from = (torch.__version__, platform.machine(), *_FLAGS, *_LINK, compiler)
    digest = hashlib.sha256("\0".join((*made_from, build.compiler_version(compiler))).encode())
    digest.update(_SOURCE.read_bytes())
    return build.cache_folder() / f"host-{digest.hexdigest()[:16]}"


class Host:
    """The process, with an artifact loaded.

    Args:
        format_name: `torchscript` or `aot_inductor`.
        artifact: the file.
        libraries: to be opened first, in order.
        device: `cpu` or `cuda`.

    Raises:
        RuntimeError: it cannot load them, with the reason; or it died of loading them.
    """

    def __init__(
        self, format_name: str, artifact: Path, libraries: Sequence[Path], device: str = "cpu"
    ) -> None:
        # Packages of some versions of torch name more of its libraries than the host links.
        path = os.pathsep.join(
            filter(None, [str(_TORCH / "lib"), os.environ.get("LD_LIBRARY_PATH")])
        )
        self._popen = subprocess.Popen(
            [binary(), format_name, artifact, device, *libraries],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"LD_LIBRARY_PATH": path},
        )
        weakref.finalize(self, _end, self._popen)
        self._answer()

    def ask(self, what: str, request: Mapping[str, Any]) -> Any:
        """One request and its answer; see `host/main.cpp`.

        Raises:
            RuntimeError: it failed, with the host's reason; or the host died.
        """
        content = io.BytesIO()
        torch.save(dict(request), content)
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(b"%s %d\n" % (what.encode(), content.tell()))
            self._popen.stdin.write(content.getbuffer())
            self._popen.stdin.flush()
        except BrokenPipeError:
            raise RuntimeError(self._last_words()) from None
        return torch.load(io.BytesIO(self._answer()), weights_only=True)

    def ended(self) -> bool:
        """Whether the process has ended."""
        return self._popen.poll() is not None

    def _answer(self) -> bytes:
        assert self._popen.stdout is not None
        word, _, size = self._popen.stdout.readline().partition(b" ")
        content = self._popen.stdout.read(int(size)) if size.endswith(b"\n") else b""
        if word not in (b"ok", b"error") or len(content) != int(size):
            raise RuntimeError(self._last_words())
        if word == b"error":
            raise RuntimeError(telling_line(content.decode("utf-8", errors="replace")))
        return content

    def _last_words(self) -> str:
        _end(self._popen)
        how = ending(self._popen.returncode)
        return f"the C++ host {'was ' * how.startswith('killed')}{how}"


def _end(popen: "subprocess.Popen[bytes]") -> None:
    """Without input the host ends by itself; one that is at work is not waited for."""
    for pipe in (popen.stdin, popen.stdout):
        _close(pipe)
    try:
        popen.wait(timeout=5)
    except subprocess.TimeoutExpired:
        popen.kill()
        popen.wait()


def _close(pipe: IO[bytes] | None) -> None:
    assert pipe is not None
    try:
        pipe.close()
    except BrokenPipeError:  # what was not sent is sent on closing, and nobody is there
        return
