"""The child process: `python -m fuseport.exporter.runtimes._worker REQUEST`.

REQUEST is a JSON file, written by `fuseport.exporter.verify.run`. For each job the child leaves an
empty file `<id>.started`, then a result: `<id>.safetensors` with tensors and `<id>.json` with what
they are. It repeats each job, and hands the results of a later call back only where they are not
the first's, bit for bit.
"""

import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fuseport.exporter import runtimes
from fuseport.exporter.runtimes import Session, Unsupported
from fuseport.exporter.runtimes._layouts import lay_out

__all__ = ["main"]


def main(request_file: str) -> None:
    """Do all jobs of a request."""
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    folder = Path(request["folder"])
    sessions: dict[tuple[str, str], Session | dict[str, Any]] = {}
    for job in request["jobs"]:
        (folder / f"{job['id']}.started").touch()
        key = (job["runtime"], job["artifact"])
        if key not in sessions:
            sessions.clear()  # one artifact at a time: models can be large
            sessions[key] = _load(job)
        session = sessions[key]
        answer = session if isinstance(session, dict) else _run(session, job, folder)
        _write(folder / f"{job['id']}.json", {**answer, "token": request["token"]})


def _load(job: Mapping[str, Any]) -> Session | dict[str, Any]:
    try:
        return runtimes.get(job["runtime"]).load(Path(job["artifact"]), job["program"])
    except Exception as error:  # whatever a runtime raises becomes a row of the report
        return _failure("cannot load the artifact", error)


def _run(session: Session, job: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    tensors = load_file(job["tensors"])
    layout = job["layout"]
    inputs = {n: lay_out(tensors[f"input/{n}"], layout) for n in job["inputs"]}
    cotangents = {n: lay_out(tensors[f"cotangent/{n}"], layout) for n in job["cotangents"]}
    first: dict[str, Tensor] = {}
    calls = []
    none: list[str] = []
    for call in range(job["repeats"]):
        try:
            if job["way"] == "autograd":
                results = session.differentiate(inputs, cotangents)  # type: ignore[attr-defined]
            else:
                named = {f"cotangent_{name}": tensor for name, tensor in cotangents.items()}
                results = session.run({**inputs, **named})
        except Exception as error:  # as above
            return _failure(f"call {call + 1} failed", error)
        found = {name: t.detach().contiguous() for name, t in results.items() if t is not None}
        if call == 0:
            first, none = found, [name for name, t in results.items() if t is None]
        elif _same(first, found):
            continue
        name = f"{job['id']}.{call}.safetensors"
        save_file(_apart(found), folder / name)
        calls.append({"call": call + 1, "file": name})
    return {"status": "done", "calls": calls, "none": none}


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, no two of them sharing memory: the file format does not allow that."""
    storages = Counter(tensor.untyped_storage().data_ptr() for tensor in tensors.values())
    return {
        name: t.clone() if storages[t.untyped_storage().data_ptr()] > 1 else t
        for name, t in tensors.items()
    }


def _same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))
        for a, b in ((one[name], other[name]) for name in one)
    )


def _bits(tensor: Tensor) -> Tensor:
    """The same memory as integers, so that NaN equals NaN and -0.0 is not 0.0."""
    return tensor.reshape(-1).view(torch.uint8) if tensor.numel() else tensor


def _failure(what: str, error: Exception) -> dict[str, Any]:
    traceback.print_exc()
    status = "unsupported" if isinstance(error, Unsupported) else "error"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = f"{what}: {type(error).__name__}: {lines[0] if lines else 'no message'}"
    return {"status": status, "reason": str(error) if status == "unsupported" else reason}


def _write(path: Path, content: Mapping[str, Any]) -> None:
    """In one step, so that a result is there whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content), encoding="utf-8")
    os.replace(partial, path)


if __name__ == "__main__":
    main(sys.argv[1])
