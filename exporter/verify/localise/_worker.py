"""The child process: `python -m fuseport.exporter.verify.localise._worker JOB TOLD`.

JOB is a JSON file, made by `fuseport.exporter.verify.localise`. The child appends a JSON line to
TOLD for each failure that it begins with, and its diagnosis; children of its own run what it makes.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fuseport.exporter.bundle import Bundle
from fuseport.exporter.child import Limits, die_with_parent
from fuseport.exporter.program import Program
from fuseport.exporter.runtimes._ops import register
from fuseport.exporter.user_code.op_choice import own_ops
from fuseport.exporter.verify.localise.investigation import investigated
from fuseport.exporter.verify.localise.repro import written
from fuseport.exporter.verify.localise.scene import Failure, Scene, captured
from fuseport.exporter.verify.localise.trial import Trials
from fuseport.exporter.verify.plan import Job
from fuseport.exporter.verify.run import quick_starts
from fuseport.exporter.verify.sample import read_all

__all__ = ["main"]

Captured = dict[str, dict[str, Program]]
"""By the program that a failure is of, those that it is looked into with."""


def main(asked: Path, heard: Path) -> None:
    """Look into failures."""
    content = json.loads(asked.read_text(encoding="utf-8"))
    die_with_parent()
    known: Captured = {}
    devices = {p["device"] for f in content["failures"] for p in f["programs"].values()}
    own = own_ops(content["own_ops"])
    with quick_starts(wanted=devices == {"cpu"}), heard.open("ab", buffering=0) as file, own:

        def tell(event: dict[str, Any]) -> None:
            file.write(json.dumps(event).encode() + b"\n")

        for request in content["failures"]:
            tell({"at": ""})
            tell(_answer(request, known, lambda step: tell({"at": f": {step}"})))
        tell({"over": True})


def _answer(
    request: dict[str, Any], known: Captured, progress: Callable[[str], None]
) -> dict[str, Any]:
    job = Job(**{**request["job"], "artifact": Path(request["job"]["artifact"])})
    failure = Failure(job, tuple(request["tensors"]), request["call"])
    folder = Path(request["bundle"])
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    bundle = Bundle(folder, manifest, request["sha256"])
    if manifest["ops"]:
        register({"ops": list(manifest["ops"])})
    samples = {sample.case.name: sample for sample in read_all(Path(request["samples"]))}
    sample = samples[job.case]
    if job.program not in known:  # which takes longer than the rest, of a small model
        progress("capturing the model again")
        known[job.program] = captured(bundle, job.program, request["code"])
    programs = known[job.program]
    limits = Limits(request["seconds"], request["memory"])
    trials = Trials(Path(request["folder"]), request["programs"], sample, limits, call=failure.call)
    scene = Scene(bundle, programs, sample, trials, request["budget"])
    finding = investigated(failure, scene, progress)
    note = None
    if request["repro"] is not None:
        progress("writing a script that shows it")
        note = written(finding, failure, scene, Path(request["repro"]))
    return {"diagnosis": asdict(finding.diagnosis), "repro": note}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
