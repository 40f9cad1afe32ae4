"""Which forms of backward a runtime does not have, for the notes of a report."""

from collections.abc import Iterable

from fuseport.exporter.program.backward_forms import AT_ONCE, FORMS
from fuseport.exporter.verify.report import Row

__all__ = ["untried"]

_WHY = {
    "forms": "a gradient program has no autograd to ask",
    "autograd forms": "its autograd is asked for all gradients in one call",
}


def untried(rows: Iterable[Row]) -> tuple[str, ...]:
    """A sentence on the forms that were not possible, with the artifacts and runtimes.

    They are no rows: nobody can make them possible, and `--strict` is about what could be.
    """
    tried: dict[tuple[str, str, str], set[str]] = {}
    for row in rows:
        if row.way in _WHY and row.tensor != "*":
            tried.setdefault((row.runtime, row.artifact, row.way), set()).add(row.tensor)
    found: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (runtime, artifact, way), forms in tried.items():
        absent = tuple(name for name in FORMS if name not in forms)
        reason = _WHY[way]
        if absent == (AT_ONCE,):
            reason = "two sets of its gradients would take too much memory"
        if absent:
            found.setdefault((reason, absent), []).append(f"{artifact} in {runtime}")
    return tuple(
        f"backward {', '.join(absent)}: not possible, as {reason}: {', '.join(places)}"
        for (reason, absent), places in found.items()
    )
