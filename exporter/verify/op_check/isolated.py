"""The checks of ops in a child process: a kernel that crashes costs its own row, and no other.

The child (`_worker`) writes each row to a file as it is done. Where it ends before its time, the
check that it was at is an `error`, and another child goes on with the next.
"""

import json
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from fuseport.exporter.child import Child, Limits, pauses
from fuseport.exporter.child.confined import Bounds
from fuseport.exporter.describe import environment
from fuseport.exporter.verify.op_check import wanted_checks
from fuseport.exporter.verify.op_check.report import OpReport, OpRow

__all__ = ["check", "told"]

_WORKER = "fuseport.exporter.verify.op_check._worker"


def check(
    names: Sequence[str],
    place: str | None,
    *,
    only: Sequence[str] = (),
    quick: bool = False,
    cases: int | None = None,
    seed: int = 0,
    limits: Limits | None = None,
    progress: Callable[[str], None] = lambda message: None,
) -> OpReport:
    """Check ops, as `op_check.check` does.

    Args:
        names: of the ops.
        place: the user's module, file or folder that defines them; None for registered ones.
        only: the checks to make, by name; all if empty.
        quick: leave out the slow ones, unless `only` names them.
        cases: how many of each operator's to take, drawn with the seed; None for all.
        seed: of values and of the sample.
        limits: of each check, in the child; None for an hour.
        progress: told of each step.

    Raises:
        UsageError: there is no check of a name.
    """
    begin = time.monotonic()
    pending = [(op, name) for op in names for name in wanted_checks(only, quick)]
    rows: list[OpRow] = []
    implementations: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="fuseport-") as folder:
        while pending:
            job = {"place": place, "pending": pending, "cases": cases, "seed": seed}
            for event in told(_WORKER, job, Path(folder), limits or Limits(3600.0)):
                if "lost" in event:
                    op, name = pending.pop(0)
                    reason = f"its process was lost: {event['lost']}"
                    rows.append(OpRow(op, name, "error", reason, 0, (), 0.0))
                elif "at" in event:
                    progress(event["at"])
                elif "implementation" in event:
                    implementations.update(event["implementation"])
                else:
                    row = OpRow(**{**event, "failures": tuple(event["failures"])})
                    rows.append(row)
                    pending.remove((row.op, row.check))
    seconds = time.monotonic() - begin
    return OpReport(tuple(rows), implementations, seed, environment(), seconds)


def told(
    worker: str,
    job: dict[str, Any],
    folder: Path,
    limits: Limits,
    bounds: Bounds | None = None,
) -> Generator[dict[str, Any], None, None]:
    """What a child tells, up to its end; its clock starts again with each event.

    Args:
        worker: the module, run as `python -m worker JOB TOLD`.
        job: what the child is asked. Its last event is the first with `over` set.
        folder: for the files between them.
        limits: of the child; of its time, from one event to the next.
        bounds: see `child.Child`.

    Yields:
        The events. Where the child ends before it is over, the last is `lost`, its last words.
    """
    heard, asked = folder / "told.jsonl", folder / "job.json"
    heard.write_bytes(b"")
    asked.write_text(json.dumps(job), encoding="utf-8")
    arguments = [worker, str(asked), str(heard)]
    with Child(arguments, folder / "errors", limits, bounds) as child:
        at, rest = 0, b""
        child.expect(True)
        pause = pauses()
        while True:
            over = child.ended()  # before reading: what it wrote before its end is read then
            with heard.open("rb") as file:
                file.seek(at)
                new = file.read()
            at += len(new)
            *lines, rest = (rest + new).split(b"\n")
            for line in lines:
                event = json.loads(line)
                child.expect(True)
                pause = pauses()
                if event.get("over"):
                    return
                yield event
            if over:
                yield {"lost": child.last_words()}
                return
            next(pause)
