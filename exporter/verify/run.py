"""Jobs → what runtimes answered, each runtime in a child process, limited in time and memory.

A child that dies takes one job with it: that job is an error, and a new child does the rest. So
does one whose answer is not to be believed.
"""

import json
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from safetensors import safe_open
from torch import Tensor

from fuseport.exporter import runtimes
from fuseport.exporter.checkpoint.content import show
from fuseport.exporter.child import Child, Limits
from fuseport.exporter.child.fork_server import preloaded
from fuseport.exporter.child.spent import OF_CHILD
from fuseport.exporter.program import one_line
from fuseport.exporter.verify.plan import REPEATS, Job
from fuseport.exporter.verify.sample import Sample

__all__ = ["WORKER", "Answer", "Limits", "execute", "quick_starts"]

WORKER = "fuseport.exporter.runtimes._worker"

_PRELOADED = (
    WORKER,
    # What torch imports when a `.pt2` file is loaded, or a model is run as for an export.
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "torch.export._trace",
    "sympy.combinatorics",
    "onnx.reference",
)
_REASON = 2000  # characters of one, which a runtime can make as long as it likes
_LONGEST = 2**26  # bytes of an answer, whose tensors are in files of their own
_AHEAD = 2  # jobs that a child may do before the first of them is judged: so many files may lie

Numbered = tuple[int, Job]

Programs = Mapping[str, Mapping[str, Any]]
"""By program, see `program.KINDS`, what a manifest says of it."""


@dataclass(frozen=True)
class Answer:
    """What came of a job.

    Attributes:
        job: it.
        status: `done`; `unsupported` or `error`, with a reason; `crash` where the child died.
        reason: for all but `done`.
        calls: the number of a call → its file of tensors; the first call, and later ones that
            differ.
        mutated: inputs and cotangents that the runtime changed.
        forms: of a job of backward forms: each by name, with the number of the call that has its
            gradients, where these are not the plain ones, and what it raised, if anything.
        drew: whether it drew random numbers.
        spent: seconds of the child's, by part; see `spent.OF_CHILD`.
    """

    job: Job
    status: Literal["done", "unsupported", "error", "crash"]
    reason: str | None = None
    calls: Mapping[int, Path] | None = None
    mutated: tuple[str, ...] = ()
    forms: tuple[tuple[str, int | None, str | None], ...] = ()
    drew: bool = False
    spent: Mapping[str, float] = field(default_factory=dict)

    def tensors(self, call: int) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor of each result of a call, one at a time from disk."""
        assert self.calls is not None
        with safe_open(self.calls[call], "pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is no mapping
                yield name, file.get_tensor(name)


def quick_starts(*, wanted: bool = True) -> AbstractContextManager[None]:
    """Have the children of `execute` forked within; see `child.fork_server.preloaded`."""
    return preloaded(_PRELOADED, wanted=wanted)


def execute(
    jobs: Sequence[Job],
    samples: Mapping[str, Sample],
    programs: Callable[[Job], Programs],
    folder: Path,
    limits: Limits,
    started: Callable[[Job], None] = lambda _: None,
    worker: str = WORKER,
) -> Generator[Answer | None, None, None]:
    """Do the jobs of one runtime, in order; each answer comes as soon as it is there.

    It waits for none: as often as there is none yet, it gives None; see `turns.waited`. An answer's
    files are deleted when the next one is asked for. Close the iterator to end the child early.

    Args:
        jobs: of one runtime.
        samples: by the case's name.
        programs: of what a job runs; see `runtimes.Runtime.load`.
        folder: empty, for this call alone.
        limits: of each child.
        started: told of each job that begins.
        worker: the module that the child runs.
    """
    waiting = list(enumerate(jobs))
    while waiting:
        # What an earlier child began, or left in the way.
        shutil.rmtree(folder)
        folder.mkdir()
        token = secrets.token_hex(16)
        requests = [_request(number, job, samples, programs(job)) for number, job in waiting]
        file = folder / "request.json"
        content: dict[str, Any] = {"token": token, "folder": str(folder), "jobs": requests}
        content["own_ops"] = programs(waiting[0][1])["forward"].get("own_ops")
        file.write_text(json.dumps(content), encoding="utf-8")
        arguments = [worker, str(file)]
        first = waiting[0][1]
        bounds = runtimes.confine(first.runtime, [*programs(first).values()], folder)
        with Child(arguments, folder / "stderr", limits, bounds) as child:
            child.tell("\n" * _AHEAD)
            sound, answered = True, 0
            while waiting and sound:
                answer = yield from _looked_for(child, folder, waiting[0], token, started)
                if answer is None:
                    break
                waiting.pop(0)
                answered += 1
                sound = answer.status != "crash"
                yield answer
                for path in (answer.calls or {}).values():
                    path.unlink(missing_ok=True)
                child.tell("\n")
            if waiting and sound:
                dead = _dead_with(folder, waiting, answered)
                reason = show(child.last_words(), _REASON)
                yield from (Answer(job, "crash", reason) for _, job in waiting[:dead])
                waiting = waiting[dead:]


def _request(
    number: int,
    job: Job,
    samples: Mapping[str, Sample],
    programs: Programs,
) -> dict[str, Any]:
    sample = samples[job.case]
    entry = programs[sample.case.entry]
    # Autograd runs through the forward program.
    program = entry if job.way.startswith("autograd") else programs[job.program]
    differentiated = job.program == "gradient"
    return {
        "id": str(number),
        "runtime": job.runtime,
        "artifact": str(job.artifact),
        "program": program,
        "way": job.way,
        "tensors": str(sample.file),
        "layout": sample.case.layout,
        "inputs": [spec["name"] for spec in entry["inputs"]],
        "cotangents": _differentiable(entry) if differentiated else [],
        "repeats": REPEATS,
    }


def _differentiable(program: Mapping[str, Any]) -> list[str]:
    """The outputs that take a cotangent."""
    return [spec["name"] for spec in program["outputs"] if "float" in spec["dtype"]]


def _looked_for(
    child: Child, folder: Path, numbered: Numbered, token: str, started: Callable[[Job], None]
) -> Generator[None, None, Answer | None]:
    """The answer of a job, after as many looks as that takes; None if the child ended without."""
    number, job = numbered
    begun, answered = folder / f"{number}.started", folder / f"{number}.json"
    child.expect(True, [begun, answered])
    told = False
    while True:
        # In this order: a child that answers and ends has answered.
        ended = child.ended()
        if not told and begun.exists():
            told = True
            started(job)
        if answered.exists():
            child.expect(False)
            return _read(folder, number, job, token)
        if ended:
            return None
        yield None


def _dead_with(folder: Path, waiting: Sequence[Numbered], answered: int) -> int:
    """How many jobs a dead child takes with it, of those without an answer.

    The one it was at, or on its way to; all that use the same artifact if it died of loading that;
    and simply all if it has answered nothing, and never got to the first.
    """
    number, job = waiting[0]
    if not (folder / f"{number}.started").exists():
        return 1 if answered else len(waiting)
    if (folder / f"{number}.loaded").exists():
        return 1
    return next((i for i, (_, w) in enumerate(waiting) if w.artifact != job.artifact), len(waiting))


def _read(folder: Path, number: int, job: Job, token: str) -> Answer:
    try:
        content = json.loads(_plain(folder / f"{number}.json"))
        if content["token"] != token:
            return Answer(job, "crash", "an answer that is not the child's own")
        spent = {part: float(content["spent"][part]) for part in OF_CHILD}
        if not all(0 <= seconds < float("inf") for seconds in spent.values()):
            raise ValueError("it has spent no number of seconds")
        if content["status"] in ("error", "unsupported"):
            status: Literal["unsupported", "error"] = content["status"]
            return Answer(job, status, show(content["reason"], _REASON), spent=spent)
        if content["status"] != "done":
            raise ValueError(f"it says {str(content['status'])[:80]!r}")
        # Names of files are not the child's to say.
        calls = {
            int(call): folder / f"{number}.{int(call)}.safetensors" for call in content["calls"]
        }
        forms = tuple((str(f["name"]), f["call"], f["error"]) for f in content.get("forms", ()))
        # Without a first call there is nothing to compare, which must not look like a pass.
        if 1 not in calls and not job.way.endswith("forms"):
            raise ValueError("it has no results")
        if not {call for _, call, _ in forms} <= {None, *calls}:
            raise ValueError("a form has no results")
        for path in calls.values():
            if not stat.S_ISREG(path.lstat().st_mode):
                raise ValueError(f"{path.name} is no plain file")
        mutated = tuple(str(name) for name in content["mutated"])
        drew = content["drew"] is True
        return Answer(job, "done", None, calls, mutated, forms, drew, spent)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return Answer(job, "crash", f"its answer cannot be read: {one_line(error)}")


def _plain(path: Path) -> bytes:
    """What is in a file that a child wrote; no link is followed, and no pipe is waited at."""
    opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(opened, "rb") as file:
        found = os.fstat(opened)
        if not stat.S_ISREG(found.st_mode) or found.st_size > _LONGEST:
            raise ValueError(f"{path.name} is no plain file, or too long")
        return file.read()
