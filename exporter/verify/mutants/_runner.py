"""The child that runs jobs with bugs planted in ops: `runtimes._worker`, with a bug in each job.

A job's program says under `planted` which: the op, the seed and the mutant's label, and `met`, a
file that is left where the op computed anything else than the right one would have.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from fuseport.exporter.runtimes._device import device_of
from fuseport.exporter.runtimes._worker import main
from fuseport.exporter.verify.mutants.kinds import Change, Mutant
from fuseport.exporter.verify.mutants.ops import mutants
from fuseport.exporter.verify.mutants.planting import planted
from fuseport.exporter.verify.op_check.subject import same_bits
from fuseport.ops import OPS
from fuseport.ops.spec import Inputs, Outputs, Run


@contextmanager
def _around(job: Mapping[str, Any]) -> Iterator[None]:
    wanted = job["program"].get("planted")
    if wanted is None:
        yield
        return
    found = _mutants(wanted["op"], wanted["seed"])[wanted["label"]]
    assert found.change is not None
    met = Path(wanted["met"])
    if found.kind.key != "CPU":  # what autograd records cannot be told from values
        met.touch()
    device = device_of(job["program"]).type
    with planted(OPS[found.op], replace(found, change=_watched(found.change, met)), device):
        yield


@cache
def _mutants(op: str, seed: int) -> dict[str, Mutant]:
    """Made once, so that what a mutant keeps from call to call it keeps from job to job."""
    return {mutant.label: mutant for mutant in mutants(OPS[op], seed)}


def _watched(change: Change, met: Path) -> Change:
    """The same; it leaves the file `met` once it gives anything else than what is right."""

    def watched(right: Run, given: Inputs) -> Outputs:
        found = change(right, given)
        if not met.exists():
            exact = right(given)
            if not all(same_bits(found[name], exact[name]) for name in exact):
                met.touch()
        return found

    return watched


if __name__ == "__main__":
    main(sys.argv[1], _around)
