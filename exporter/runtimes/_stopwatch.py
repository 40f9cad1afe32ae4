"""The child process of `fuseport bench`: `python -m fuseport.exporter.runtimes._stopwatch REQUEST`.

REQUEST is a JSON file, written by `fuseport.exporter.bench`. Each line on standard input asks for
some calls, and gets a file, `<number of the line>.json`; the end of standard input ends the child.
The first answer, `0.json`, says whether the artifact is loaded.
"""

import json
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import psutil
import torch
from safetensors import safe_open

from fuseport.exporter import runtimes
from fuseport.exporter.child import die_with_parent
from fuseport.exporter.child.confined import work_in
from fuseport.exporter.runtimes import Session
from fuseport.exporter.runtimes._device import place_of
from fuseport.exporter.runtimes._worker import failure, standard_input, write
from fuseport.exporter.user_code.op_choice import own_ops

__all__ = ["main"]


def main(request_file: str) -> None:
    """Time an artifact in a runtime, as often as asked."""
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    die_with_parent()
    asked = standard_input()
    folder = Path(request["folder"])
    work_in(folder)
    with own_ops(request["program"].get("own_ops")):
        _answer(request, asked, folder)


def _answer(request: Mapping[str, Any], asked: IO[bytes], folder: Path) -> None:
    try:
        session = runtimes.get(request["runtime"]).load(
            Path(request["artifact"]), request["program"]
        )
    except Exception as error:  # whatever a runtime raises becomes a row of the table
        write(folder / "0.json", failure("cannot load the artifact", error))
        return
    write(folder / "0.json", {"status": "done"})
    number = 0
    while line := asked.readline():
        number += 1
        write(folder / f"{number}.json", _timed(session, {**request, **json.loads(line)}))


def _timed(session: Session, job: Mapping[str, Any]) -> dict[str, Any]:
    place = place_of(session)
    with safe_open(job["tensors"], "pt") as file:
        inputs = {n: file.get_tensor(f"input/{n}").to(place) for n in job["inputs"]}
        cotangents = {n: file.get_tensor(f"cotangent/{n}").to(place) for n in job["cotangents"]}
    seconds: list[float] = []
    try:
        _wait_for(place)
        for _ in range(job["calls"]):
            begin = time.perf_counter()
            if job["way"] == "autograd":
                session.differentiate(inputs, cotangents)  # type: ignore[attr-defined]
            elif job["kind"] == "gradient":
                named = {f"cotangent_{name}": tensor for name, tensor in cotangents.items()}
                session.run({**inputs, **named})
            else:
                session.run(inputs)
            _wait_for(place)
            passed = time.perf_counter() - begin
            # A session that hands tensors to another process says what the call itself took there.
            seconds.append(getattr(session, "seconds", None) or passed)
    except Exception as error:  # as above
        return failure("a call failed", error)
    return {"status": "done", "seconds": seconds, "peak": _peak()}


def _wait_for(device: torch.device) -> None:
    """A GPU may have done nothing yet when a call returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak() -> int:
    """The most memory that this process, and each that it started, has had resident, in bytes."""
    me = psutil.Process()
    total = 0
    for process in [me, *me.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            total += _high_water_mark(process)
    return total


def _high_water_mark(process: psutil.Process) -> int:
    if sys.platform == "linux":
        with suppress(OSError):
            for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    return int(process.memory_info().rss)


if __name__ == "__main__":
    main(sys.argv[1])
