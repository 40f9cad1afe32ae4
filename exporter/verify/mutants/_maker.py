"""The child that makes wrong files: no process that judges loads an artifact.

    python -m fuseport.exporter.verify.mutants._maker JOB TOLD

JOB is a JSON file with what `files.Asked` has, the file's `format`, the `folder` to write to and
`ops`, the place of the user's own; a JSON line is appended to TOLD for each wrong file.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from fuseport.exporter.child.confined import work_in
from fuseport.exporter.program import one_line
from fuseport.exporter.user_code.op_choice import own_ops
from fuseport.exporter.verify.mutants.files import AHEAD, Asked, maker

_POLL_SECONDS = 0.1


def _main(file: Path, heard: Path) -> None:
    work_in(file.parent)
    job = json.loads(file.read_text(encoding="utf-8"))
    with heard.open("ab", buffering=0) as out, own_ops(job["ops"]):

        def tell(event: dict[str, Any]) -> None:
            out.write(json.dumps(event).encode() + b"\n")

        artifact, folder = Path(job["artifact"]), Path(job["folder"])
        source = None if job["source"] is None else Path(job["source"])
        asked = Asked(artifact, source, job["program"], job["sizes"], job["seed"], job["count"])
        suffix = artifact.name.partition(".")[2]
        for number, made in enumerate(maker(job["format"])(asked)):
            while sum(file.stat().st_size for file in folder.glob(f"*.{suffix}")) > AHEAD:
                time.sleep(_POLL_SECONDS)  # until those that were made are done with
            path = folder / f"{number}.{suffix}"
            told = {"of": artifact.name, "kind": made.kind, "place": made.place}
            try:
                made.write(path)
            except Exception as error:  # not every edit leaves what a format can say
                path.unlink(missing_ok=True)
                tell({"refused": {**told, "reason": one_line(error)}})
            else:
                tell({"made": {**told, "file": path.name}})
        tell({"over": True})


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(sys.argv[2]))
