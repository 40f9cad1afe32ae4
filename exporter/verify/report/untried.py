"""Which forms of backward runtimes do not have: told from the rows, short or whole."""

from collections.abc import Iterable
from dataclasses import dataclass

from fuseport.exporter.program.backward_forms import AT_ONCE, FORMS, TRACED_AGAIN
from fuseport.exporter.verify.report.model import Row

__all__ = ["Untried", "untried"]


@dataclass(frozen=True)
class Untried:
    """Forms that were not possible, for one reason.

    They are no rows: nobody can make them possible, and `--strict` is about what could be.

    Attributes:
        forms: their names.
        why: the reason, as a clause.
        short: the same in two or three words.
        places: artifacts, each with its runtime.
        programs: what the artifacts are, where the reason is theirs and not the runtimes'.
    """

    forms: tuple[str, ...]
    why: str
    short: str
    places: tuple[tuple[str, str], ...]
    programs: str | None

    @property
    def line(self) -> str:
        """How many, where and why, for a screen."""
        where = self.programs or ", ".join(dict.fromkeys(runtime for _, runtime in self.places))
        forms = f"{len(self.forms)} of {len(FORMS)} forms of backward"
        return f"{forms} not possible in {where}: {self.short}"

    @property
    def sentence(self) -> str:
        """The whole: each form and each place by its name."""
        places = ", ".join(f"{artifact} in {runtime}" for artifact, runtime in self.places)
        return f"backward {', '.join(self.forms)}: not possible, as {self.why}: {places}"


_WHY = {
    "forms": ("a gradient program has no autograd to ask", "no autograd", "gradient programs"),
    "autograd forms": (
        "its autograd is asked for all gradients in one call", "autograd is one call", None,
    ),
}  # fmt: skip
_ALONE: dict[tuple[str, ...], tuple[str, str, str | None]] = {
    (AT_ONCE,): (
        "two sets of its gradients would take too much memory", "too much memory", None,
    ),
    TRACED_AGAIN: (
        "torch traces its operators with graphs inside, torch.cond or scan, anew at every call",
        "torch.cond or scan", None,
    ),
}  # fmt: skip


def untried(rows: Iterable[Row]) -> tuple[Untried, ...]:
    """What was not possible, by reason and forms."""
    tried: dict[tuple[str, str, str], set[str]] = {}
    for row in rows:
        if row.way in _WHY and row.tensor != "*":
            tried.setdefault((row.runtime, row.artifact, row.way), set()).add(row.tensor)
    found: dict[tuple[tuple[str, ...], tuple[str, str, str | None]], list[tuple[str, str]]] = {}
    for (runtime, artifact, way), forms in tried.items():
        absent = tuple(name for name in FORMS if name not in forms)
        why = _ALONE.get(absent, _WHY[way])
        if absent:
            found.setdefault((absent, why), []).append((artifact, runtime))
    return tuple(
        Untried(absent, why, short, tuple(places), programs)
        for (absent, (why, short, programs)), places in found.items()
    )
