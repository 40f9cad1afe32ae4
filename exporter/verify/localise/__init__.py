"""Failed rows → diagnoses: where each failure begins, and who is at fault.

Failures are looked into in a child process, limited in time and memory as the runtimes' own. One
child takes all of them, since the model is captured once then; one that dies costs one failure.
"""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from fuseport.exporter import runtimes
from fuseport.exporter.child import Limits
from fuseport.exporter.verify.diagnosis import Diagnosis
from fuseport.exporter.verify.op_check.isolated import told
from fuseport.exporter.verify.plan import Job
from fuseport.exporter.verify.report import FLOAT64, OWN_BACKWARD, Row
from fuseport.exporter.verify.sample import write_index
from fuseport.exporter.verify.subject import Subject

__all__ = ["BUDGET", "Settings", "diagnosed"]

BUDGET = 2**28
"""Bytes of a program's values that are looked at in one round."""

_MOST = 6  # failures to look into; more say the same over and over
_SECONDS = 900.0  # for all of them
_WORKER = "fuseport.exporter.verify.localise._worker"
_LATER = re.compile(r"at call (\d+), which differs")


@dataclass(frozen=True)
class Settings:
    """How failures are looked into.

    Attributes:
        code: the user's own model code, as of `api.verify`.
        own: where the user's own ops come from.
        limits: of each child, and of one failure altogether.
        repro: a folder for scripts that show the mismatch without fuseport; None for none.
        wanted: whether they are at all.
        budget: bytes of values at a time.
    """

    code: str | None = None
    own: str | None = None
    limits: Limits = Limits()  # noqa: RUF009  # it is frozen
    repro: Path | None = None
    wanted: bool = True
    budget: int = BUDGET


def diagnosed(
    rows: Sequence[Row],
    jobs: Mapping[str, Sequence[Job]],
    subject: Subject,
    work: Path,
    settings: Settings,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[tuple[Diagnosis, ...], tuple[str, ...]]:
    """Look into the first failing case of each artifact, runtime and way; at most a handful.

    Args:
        rows: of a verification.
        jobs: that they came of, by runtime.
        subject: that was verified.
        work: a folder to work in.
        settings: how.
        progress: told of each failure.

    Returns:
        The diagnoses, and a sentence on each script that was written or could not be.
    """
    if not settings.wanted:
        return (), ()
    failures = _failures(rows, [job for part in jobs.values() for job in part])
    waiting = failures[:_MOST]
    found: list[Diagnosis] = []
    notes: list[str] = []
    deadline = time.monotonic() + _SECONDS
    for number in count():
        left = deadline - time.monotonic()
        if not waiting or left <= 0.0:
            break
        folder = work / f"localise{number}"
        folder.mkdir()
        limits = replace(settings.limits, seconds=min(left, settings.limits.seconds))
        at = replace(settings, limits=limits)
        asked = [
            _request(job, failed, subject, folder / str(i), at)
            for i, (job, failed) in enumerate(waiting)
        ]
        child = {"own_ops": settings.own, "failures": asked}
        with closing(told(_WORKER, child, folder, limits)) as events:
            for event in events:
                if not waiting:
                    break
                job, failed = waiting[0]
                row = failed[0]
                if "at" in event:
                    what = f"{job.runtime}: {row.artifact}: {job.program}: {job.case}"
                    progress(f"looking into {what}{event['at']}")
                    continue
                waiting = waiting[1:]
                if "lost" in event:
                    here = row.runtime, row.artifact, row.program, row.way, row.case
                    found.append(Diagnosis(*here, None, f"what looked into it: {event['lost']}"))
                    break
                diagnosis = Diagnosis.from_json(event["diagnosis"])
                if subject.changed and diagnosis.cause == "export":
                    why = f"the model itself is not as at the export; {diagnosis.reason}"
                    diagnosis = replace(diagnosis, cause=None, reason=why)
                found.append(diagnosis)
                if event["repro"] is not None:
                    notes.append(event["repro"])
                if time.monotonic() > deadline:
                    break  # the child goes with it
    if more := len(failures) - len(found):
        notes.append(f"{more} failures more were not looked into")
    return tuple(found), tuple(notes)


def _failures(rows: Sequence[Row], jobs: Sequence[Job]) -> list[tuple[Job, list[Row]]]:
    """The first failing job of each artifact, runtime, program and way, with its failed rows."""
    found: dict[tuple[str, ...], tuple[Job, list[Row]]] = {}
    named: dict[tuple[str, ...], Job] = {
        (j.runtime, _artifact(j), j.program, j.way, j.case): j for j in jobs
    }
    for row in rows:
        if row.verdict != "fail" or row.runtime == FLOAT64 or row.way == OWN_BACKWARD:
            continue
        if row.way.endswith("forms"):
            continue  # such a row says in which form of backward it is; the plain one has its own
        job = named.get((row.runtime, row.artifact, row.program, row.way, row.case))
        if job is None:
            continue
        key = (row.runtime, row.artifact, row.program, row.way)
        first, failed = found.setdefault(key, (job, []))
        if first == job:
            failed.append(row)
    return list(found.values())


def _artifact(job: Job) -> str:
    return "model" if runtimes.get(job.runtime).FORMAT is None else job.artifact.name


def _request(
    job: Job,
    failed: Sequence[Row],
    subject: Subject,
    folder: Path,
    settings: Settings,
) -> dict[str, Any]:
    """What the child is told of one failure, and a folder for it."""
    folder.mkdir()
    sample, bundle = subject.samples[job.case], subject.bundle
    index = folder / "samples"
    index.mkdir()
    # Where the tensors are stays the same; the index is beside the request.
    write_index(index, [sample])
    (index / sample.file.name).symlink_to(sample.file.resolve())
    later = _LATER.match(failed[0].reason or "")
    repro = settings.repro
    return {
        "folder": str(folder),
        "bundle": str(bundle.folder.resolve()),
        "sha256": bundle.sha256,
        "code": settings.code,
        "job": {**asdict(job), "artifact": str(job.artifact.resolve())},
        "tensors": [*dict.fromkeys(row.tensor for row in failed)],  # each call has rows of its own
        "call": 1 if later is None else int(later[1]),
        "samples": str(index),
        "programs": subject.programs,
        "seconds": settings.limits.seconds,
        "memory": settings.limits.memory,
        "budget": settings.budget,
        "repro": None if repro is None else str((repro / _slug(job)).resolve()),
    }


def _slug(job: Job) -> str:
    text = f"{job.runtime}-{_artifact(job)}-{job.program}-{job.way}"
    return re.sub(r"[^A-Za-z0-9.+]+", "-", text)
