"""Jobs → what runtimes answered, each runtime in a child process, limited in time and memory.

A child that dies takes one job with it: that job is an error, and a new child does the rest.
"""

import json
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fuseport.exporter.verify.plan import REPEATS, Job
from fuseport.exporter.verify.truth import Sample

__all__ = ["Answer", "Limits", "execute"]

_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Limits:
    """What a child may take.

    Attributes:
        seconds: for one job, loading included.
        memory: bytes resident in the child and its children; None for no limit.
    """

    seconds: float = 900.0
    memory: int | None = None


@dataclass(frozen=True)
class Answer:
    """What came of a job.

    Attributes:
        job: it.
        status: `done`; `unsupported` or `error`, with a reason; `crash` where the child died.
        reason: for all but `done`.
        calls: the number of a call → its file of tensors; the first call, and later ones that
            differ.
        none: gradients that the runtime says do not exist.
    """

    job: Job
    status: Literal["done", "unsupported", "error", "crash"]
    reason: str | None = None
    calls: Mapping[int, Path] | None = None
    none: tuple[str, ...] = ()

    def tensors(self, call: int) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor of each result of a call, one at a time from disk."""
        assert self.calls is not None
        with safe_open(self.calls[call], "pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is no mapping
                yield name, file.get_tensor(name)


def execute(
    jobs: Sequence[Job],
    samples: Mapping[str, Sample],
    programs: Mapping[str, Mapping[str, Any]],
    folder: Path,
    limits: Limits,
    started: Callable[[Job], None] = lambda _: None,
) -> Iterator[Answer]:
    """Do the jobs of one runtime, in order; each answer comes as soon as its child has ended.

    Args:
        jobs: of one runtime.
        samples: by the case's name.
        programs: by program, what the manifest says of it; see `runtimes.Runtime.load`.
        folder: empty, for this call alone.
        limits: of each child.
        started: told of each job that begins.
    """
    waiting = list(enumerate(jobs))
    while waiting:
        token = secrets.token_hex(16)
        requests = [_request(number, job, samples, programs) for number, job in waiting]
        request = {"token": token, "folder": str(folder), "jobs": requests}
        file = folder / "request.json"
        file.write_text(json.dumps(request), encoding="utf-8")
        reason = _run_child(file, dict(waiting), folder, limits, started)
        done = []
        for number, job in waiting:
            answer = _read(folder, number, job, token)
            if answer is None:
                break
            done.append(number)
            yield answer
        waiting = waiting[len(done) :]
        if waiting:
            # The first one without an answer is what the child died of.
            _, culprit = waiting.pop(0)
            yield Answer(culprit, "crash", reason or "the child ended without an answer")


def _request(
    number: int,
    job: Job,
    samples: Mapping[str, Sample],
    programs: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    sample = samples[job.case]
    forward = programs["forward"]
    # Autograd runs through the forward program.
    program = programs["gradient" if job.way == "run" and job.program == "gradient" else "forward"]
    differentiated = job.program == "gradient"
    return {
        "id": str(number),
        "runtime": job.runtime,
        "artifact": str(job.artifact),
        "program": program,
        "way": job.way,
        "tensors": str(sample.file),
        "layout": sample.case.layout,
        "inputs": [spec["name"] for spec in forward["inputs"]],
        "cotangents": _differentiable(forward) if differentiated else [],
        "repeats": REPEATS,
    }


def _differentiable(program: Mapping[str, Any]) -> list[str]:
    """The outputs that take a cotangent."""
    return [spec["name"] for spec in program["outputs"] if "float" in spec["dtype"]]


def _run_child(
    request: Path,
    jobs: Mapping[int, Job],
    folder: Path,
    limits: Limits,
    started: Callable[[Job], None],
) -> str | None:
    """Run a child to its end. Returns why it ended badly, or None."""
    command = [sys.executable, "-m", "fuseport.exporter.runtimes._worker", str(request)]
    with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
        # A session of its own: a terminal's Ctrl-C reaches only the parent, which cleans up.
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
        )
        try:
            reason = _watch(child, jobs, folder, limits, started)
        finally:
            _kill_tree(child)
    if reason is not None or child.returncode == 0:
        return reason
    if child.returncode < 0:
        return f"killed by {signal.Signals(-child.returncode).name}"
    lines = (folder / "stderr").read_text(encoding="utf-8", errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "no message")
    return f"ended with code {child.returncode}: {last}"


def _watch(
    child: "subprocess.Popen[bytes]",
    jobs: Mapping[int, Job],
    folder: Path,
    limits: Limits,
    started: Callable[[Job], None],
) -> str | None:
    waiting = dict(jobs)
    since = time.monotonic()
    while child.poll() is None:
        for number in list(waiting):
            if (folder / f"{number}.started").exists():
                started(waiting.pop(number))
                since = time.monotonic()
        if time.monotonic() - since > limits.seconds:
            return f"stopped after {limits.seconds:g} s without an answer"
        if limits.memory is not None and _resident(child.pid) > limits.memory:
            return f"stopped at more than {limits.memory / 2**20:.0f} MiB of memory"
        time.sleep(_POLL_SECONDS)
    return None


def _tree(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _resident(pid: int) -> int:
    total = 0
    for process in _tree(pid):
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue  # it ended between listing and looking
    return total


def _kill_tree(child: "subprocess.Popen[bytes]") -> None:
    for process in _tree(child.pid):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue  # it ended by itself
    child.wait()


def _read(folder: Path, number: int, job: Job, token: str) -> Answer | None:
    file = folder / f"{number}.json"
    if not file.exists():
        return None
    content = json.loads(file.read_text(encoding="utf-8"))
    if content.get("token") != token:
        return None
    if content["status"] != "done":
        return Answer(job, content["status"], content["reason"])
    calls = {entry["call"]: folder / entry["file"] for entry in content["calls"]}
    for path in calls.values():
        try:
            with safe_open(path, "pt"):
                pass
        except (OSError, SafetensorError) as error:
            return Answer(job, "error", f"its results cannot be read: {error}")
    return Answer(job, "done", None, calls, tuple(content["none"]))
