"""Reads files as the command does, each in a process of its own, under limits; from files' paths.

`python -m fuseport.tests.corpus.judge FILE` reads [{"path": …, "reader": …}, …] from the JSON file
and prints for each what came out: exit code, message, processor seconds, memory, and, of a
checkpoint that was read, the hashes of its tensors. All has been imported before it forks, so that
the figures are of the reading alone.
"""

import contextlib
import hashlib
import io
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from fuseport import cli
from fuseport.exporter import api, checkpoint, models
from fuseport.exporter.errors import FuseportError
from fuseport.exporter.inspect import admissible, exported_program, torchscript

__all__ = ["forked", "hashes", "judged"]

assert callable(api.export)  # imported here, not by each child
_SECONDS = 60  # of processor time; a reader that takes as long hangs
_MEMORY = 4 * 2**30


def hashes(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Dtype, shape and bytes of each tensor, as text."""
    return {
        name: f"{t.dtype} {tuple(t.shape)} "
        + hashlib.sha256(t.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, t in ((n, t.resolve_conj().contiguous()) for n, t in tensors.items())
    }


def forked(job: Callable[[], Any]) -> dict[str, Any]:
    """What a job gives in a child, and what it took: `died` by which signal, `cpu`, `memory`.

    `memory` is what it added to the process, in bytes, at its peak.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        # Address space is what can be limited; torch's libraries and maps of files are in it too.
        resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (_virtual() + _MEMORY,) * 2)
        before = _peak()
        result = job()
        content = {"result": result, "memory": _peak() - before}
        with os.fdopen(writing, "w") as file:
            json.dump(content, file)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    _, status, used = os.wait4(child, 0)
    died = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else None
    if died is None and not text:
        died = f"exit {os.WEXITSTATUS(status)}"
    content = json.loads(text) if text else {"result": None, "memory": 0}
    return {**content, "died": died, "cpu": used.ru_utime + used.ru_stime}


def _peak() -> int:
    # In the kernel's units: KiB on Linux, bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _virtual() -> int:
    return int(psutil.Process().memory_info().vms)


def _command(path: str) -> dict[str, Any]:
    """`fuseport export`, into a bundle that is there."""
    output = Path(path).parent / "bundle"
    error = io.StringIO()
    code = 0
    with contextlib.redirect_stderr(error), contextlib.redirect_stdout(error):
        try:
            cli.main(["export", path, "-o", str(output), "--force"])
        except SystemExit as end:
            code = int(end.code or 0)
    lines = [line for line in error.getvalue().splitlines() if line.startswith("fuseport:")]
    return {"code": code, "lines": lines, "message": " ".join(lines)}


def _load(path: str) -> dict[str, Any]:
    read = checkpoint.load(Path(path))
    return {"code": 0, "tensors": hashes(read.tensors), "config": read.config}


def _artifact(path: str) -> dict[str, Any]:
    """As the child of `inspect` and of `verify --artifact` reads it."""
    if path.endswith(".onnx"):
        admissible.found(path)
    elif path.endswith(".pt2"):
        exported_program.found(path)
    else:
        torchscript.found(path)
    return {"code": 0}


def _recognised(path: str) -> dict[str, Any]:
    """Loads a checkpoint and asks what it is of: what an export does before it builds a model."""
    read = checkpoint.load(Path(path))
    models.recognised(read)
    return {"code": 0, "tensors": hashes(read.tensors)}


READERS: dict[str, Callable[[str], dict[str, Any]]] = {
    "command": _command,
    "load": _load,
    "artifact": _artifact,
    "recognised": _recognised,
}


def judged(reader: str, path: str) -> dict[str, Any]:
    """What a reader says of a file; what it raises that is no error of ours is the code 70."""
    try:
        return READERS[reader](path)
    except FuseportError as error:
        return {"code": error.exit_code, "message": str(error)}
    except Exception as error:
        return {"code": 70, "message": f"{type(error).__name__}: {error}"}


def main() -> None:
    asked = json.loads(Path(sys.argv[1]).read_text())
    answers = [forked(lambda a=a: judged(a["reader"], a["path"])) for a in asked]
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
