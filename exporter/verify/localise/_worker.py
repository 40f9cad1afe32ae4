"""The child process: `python -m fuseport.exporter.verify.localise._worker REQUEST`.

REQUEST is a JSON file, written by `fuseport.exporter.verify.localise`. The child writes the
diagnosis beside it, and children of its own run what it makes.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fuseport.exporter.bundle import Bundle
from fuseport.exporter.child import Limits
from fuseport.exporter.runtimes._ops import register
from fuseport.exporter.runtimes._worker import die_with, write
from fuseport.exporter.user_code.op_choice import own_ops
from fuseport.exporter.verify.localise.investigation import investigated
from fuseport.exporter.verify.localise.repro import written
from fuseport.exporter.verify.localise.scene import Failure, Scene, captured
from fuseport.exporter.verify.localise.trial import Trials
from fuseport.exporter.verify.plan import Job
from fuseport.exporter.verify.sample import read_all

__all__ = ["main"]


def main(request_file: str) -> None:
    """Look into one failure."""
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    die_with(request["parent"])
    with own_ops(request["own_ops"]):
        answer = _answer(request)
    write(Path(request["answer"]), answer)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    job = Job(**{**request["job"], "artifact": Path(request["job"]["artifact"])})
    failure = Failure(job, tuple(request["tensors"]), request["call"])
    folder = Path(request["bundle"])
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    bundle = Bundle(folder, manifest, request["sha256"])
    if manifest["ops"]:
        register({"ops": list(manifest["ops"])})
    samples = {sample.case.name: sample for sample in read_all(Path(request["samples"]))}
    sample = samples[job.case]
    programs = captured(bundle, job.program, request["code"])
    limits = Limits(request["seconds"], request["memory"])
    trials = Trials(Path(request["folder"]), request["programs"], sample, limits, call=failure.call)
    scene = Scene(bundle, programs, sample, trials, request["budget"])
    finding = investigated(failure, scene)
    note = None
    if request["repro"] is not None:
        note = written(finding, failure, scene, Path(request["repro"]))
    return {"diagnosis": asdict(finding.diagnosis), "repro": note}


if __name__ == "__main__":
    main(sys.argv[1])
