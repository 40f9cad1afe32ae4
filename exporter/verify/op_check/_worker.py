"""The child of `isolated`: makes checks of ops, and tells each row as soon as it is known.

    python -m fuseport.exporter.verify.op_check._worker JOB TOLD

JOB is a JSON file with `place`, `pending`, `cases` and `seed`; a JSON line is appended to TOLD for
each step, each op's implementation, and each row.
"""

import json
import sys
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from fuseport.exporter.user_code.op_choice import chosen
from fuseport.exporter.verify import op_check
from fuseport.ops import added


def _main(asked: Path, told: Path) -> None:
    job = json.loads(asked.read_text(encoding="utf-8"))
    known = {spec.name: spec for spec in chosen((), job["place"])}
    with told.open("ab", buffering=0) as file, added(known.values()):

        def tell(event: dict[str, Any]) -> None:
            file.write(json.dumps(event).encode() + b"\n")

        for op, pairs in groupby(job["pending"], key=lambda pair: pair[0]):
            for row in op_check.rows(
                known[op],
                [name for _, name in pairs],
                cases=job["cases"],
                seed=job["seed"],
                progress=lambda message: tell({"at": message}),
                registered=lambda name, how: tell({"implementation": {name: how}}),
            ):
                tell(asdict(row))
        tell({"over": True})


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(sys.argv[2]))
