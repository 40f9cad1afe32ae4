"""The child of `mutants.check`: plants one bug after the other in an op, then checks it as it is.

    python -m fuseport.exporter.verify.mutants._worker JOB TOLD

JOB is a JSON file with `op`, `place`, `quick`, `seed`, `runs`, the clean ones, and `done`, how many
bugs are to be passed over; a JSON line is appended to TOLD for each step and each result.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fuseport.exporter.user_code.op_choice import chosen
from fuseport.exporter.verify.mutants.ops import attempt, clean, mutants
from fuseport.exporter.verify.op_check import wanted_checks
from fuseport.ops import added, registration
from fuseport.ops.spec import FLOATING

_CLEAN_CASES = 2


def _main(asked: Path, heard: Path) -> None:
    job = json.loads(asked.read_text(encoding="utf-8"))
    known = {spec.name: spec for spec in chosen((), job["place"])}
    spec, seed, names = known[job["op"]], job["seed"], wanted_checks((), quick=True)
    with heard.open("ab", buffering=0) as file, added(known.values()):

        def tell(event: dict[str, Any]) -> None:
            file.write(json.dumps(event).encode() + b"\n")

        registration.ensure(spec)
        own = mutants(spec, seed, everywhere=not job["quick"])
        for mutant in own[job["done"] :]:
            tell({"at": f"planting {mutant.kind.where}: {mutant.label}"})
            tell({"planted": asdict(attempt(spec, mutant, names, seed))})
        seeds = range(seed, seed + job["runs"])
        for run in clean(
            spec, names, seeds, FLOATING, _CLEAN_CASES, lambda at: tell({"at": f"clean, {at}"})
        ):
            tell({"clean": asdict(run)})
        tell({"over": True})


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(sys.argv[2]))
