"""Planted bugs: the verifier verified. `catalogue` has the kinds, `ops` plants them in ops.

`check` runs what an op's share of the catalogue is in child processes, as `ops check` does; what
becomes of it is a `Power`. `self_test` does the same for a bundle.
"""

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fuseport.exporter.child import Limits
from fuseport.exporter.describe import environment
from fuseport.exporter.verify.mutants.report import Clean, Planted, Power
from fuseport.exporter.verify.op_check.isolated import told

__all__ = ["Clean", "Planted", "Power", "check"]

_WORKER = "fuseport.exporter.verify.mutants._worker"


def check(
    names: Sequence[str],
    place: str | None,
    *,
    quick: bool = False,
    runs: int = 2,
    seed: int = 0,
    limits: Limits | None = None,
    progress: Callable[[str], None] = lambda message: None,
) -> Power:
    """Plant the catalogue in ops, one bug at a time, and run their checks as they are beside.

    Args:
        names: of the ops.
        place: the user's module, file or folder that defines them; None for registered ones.
        quick: each kind in one place of each op, drawn with the seed; without, in every place.
            Checks that compile are left out.
        runs: of each clean check in each dtype, each with another seed.
        seed: of values and places.
        limits: of each bug and each clean check, in the child; None for an hour.
        progress: told of each step.
    """
    begin = time.monotonic()
    planted: list[Planted] = []
    clean: list[Clean] = []
    with tempfile.TemporaryDirectory(prefix="fuseport-") as folder:
        for name in names:
            job = {"op": name, "place": place, "quick": quick, "seed": seed, "done": 0}
            job["runs"] = runs
            while _again(job, Path(folder), limits or Limits(3600.0), planted, clean, progress):
                job["done"] = sum(p.op == name for p in planted)
    seconds = time.monotonic() - begin
    return Power(tuple(planted), tuple(clean), seed, environment(), seconds)


def _again(
    job: dict[str, Any],
    folder: Path,
    limits: Limits,
    planted: list[Planted],
    clean: list[Clean],
    progress: Callable[[str], None],
) -> bool:
    """Do what is left of one op; whether its child was lost to a bug, and another has to go on.

    A child that dies of a bug has shown it. One that dies of none is a false alarm.
    """
    at = "loading"
    for event in told(_WORKER, job, folder, limits):
        if "at" in event:
            at = event["at"]
            progress(f"{job['op']}: {at}")
        elif "planted" in event:
            planted.append(Planted(**event["planted"]))
        elif "clean" in event:
            clean.append(Clean(**event["clean"]))
        elif "lost" in event:
            reason = f"its process was lost: {event['lost']}"
            if at.startswith(_PLANTING):
                planted.append(_lost(job["op"], at, reason))
                return True
            clean.append(Clean(job["op"], at, "", job["seed"], 1, reason))
    return False


_PLANTING = "planting "


def _lost(op: str, at: str, reason: str) -> Planted:
    where, kind, operator, place = at.removeprefix(_PLANTING).split(": ", 3)
    return Planted(op, kind, where, operator, place, "its process", reason)
