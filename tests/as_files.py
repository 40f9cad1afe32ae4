"""Programs as files, loaded by a runtime."""

from pathlib import Path
from typing import Any

from fuseport.exporter import formats, runtimes
from fuseport.exporter.formats import Options
from fuseport.exporter.program import Program

__all__ = ["session_of"]

_FORMATS = {
    "exported_program": "exported_program",
    "onnxruntime": "onnx",
    "torchscript": "torchscript",
}


def session_of(program: Program, folder: Path, runtime: str) -> Any:
    """A session of a runtime, of a program that is written into a folder."""
    writer = formats.get(_FORMATS[runtime])
    file = folder / f"{program.kind}{writer.SUFFIX}"
    writer.write(program, file, Options(folder / "weights.safetensors"))
    names = {k: [{"name": s.name} for s in getattr(program, k)] for k in ("inputs", "outputs")}
    return runtimes.get(runtime).load(file, {"kind": program.kind, **names})
