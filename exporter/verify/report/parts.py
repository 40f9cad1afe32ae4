"""What several faces of a report need: groups of rows, their worst, and words for them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context

from fuseport.exporter.verify.compare import Verdict
from fuseport.exporter.verify.diagnosis import Diagnosis
from fuseport.exporter.verify.report.model import Report, Row
from fuseport.exporter.verify.report.untried import untried

__all__ = [
    "ORDER",
    "Group",
    "cause",
    "compared",
    "counted",
    "diagnosis_text",
    "figure",
    "groups",
    "hint",
    "located",
    "notes",
    "rounded_up",
    "way",
    "weight",
    "worst_first",
]

ORDER: tuple[Verdict, ...] = ("fail", "error", "unsupported", "pass")
"""Verdicts, the worst first."""

_CAUSES: Mapping[str | None, str] = {
    "kernel": "the kernel is at fault",
    "export": "the export is at fault",
    "runtime": "the runtime is at fault",
    None: "who is at fault could not be told",
}


@dataclass(frozen=True)
class Group:
    """The rows of one artifact in one runtime, had in one way, in the report's order.

    `name` is the artifact's, and the way where it is no plain run; empty for a row that speaks of a
    whole runtime.
    """

    runtime: str
    artifact: str
    program: str
    way: str
    rows: tuple[Row, ...]

    @property
    def name(self) -> str:
        return ("" if self.artifact == "*" else self.artifact) + way(self.way)

    @property
    def verdict(self) -> Verdict:
        """The worst of its rows'."""
        return min((row.verdict for row in self.rows), key=ORDER.index)

    @property
    def worst(self) -> Row | None:
        """The row closest to its bound, or beyond it; None where nothing was measured."""
        # A failure without figures, of another shape for example, is worse than any with.
        for row in self.rows:
            if row.verdict == "fail" and row.share is None:
                return row
        measured = [row for row in self.rows if row.share is not None]
        return max(measured, key=weight, default=None)


def groups(report: Report) -> list[Group]:
    """All rows, by runtime, artifact, program and way, as they come first in the report."""
    found: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in report.results:
        found.setdefault((row.runtime, row.artifact, row.program, row.way), []).append(row)
    # A runtime's rows stay together, whatever came between them.
    order = list(dict.fromkeys(key[0] for key in found))
    keys = sorted(found, key=lambda key: order.index(key[0]))
    return [Group(*key, tuple(found[key])) for key in keys]


def worst_first(rows: Iterable[Row]) -> list[Row]:
    """Rows that are no pass: the worst verdicts first, then the worst errors."""
    kept = [row for row in rows if row.verdict != "pass"]
    return sorted(kept, key=lambda row: (ORDER.index(row.verdict), -weight(row)))


def weight(row: Row) -> float:
    """The share of its bound; infinity where there is none, since that is no pass."""
    return math.inf if row.share is None else row.share


def way(name: str) -> str:
    """How a gradient was had, after the artifact's name; nothing for a plain run."""
    return "" if name == "run" else f", {name}"


def located(row: Row) -> str:
    """Where a row is: runtime, artifact, program, case and tensor, those that it speaks of."""
    by = "*" if row.way == "run" else f"by {row.way}"
    parts = (row.runtime, row.artifact, row.program, by, row.case, row.tensor)
    return " · ".join(part for part in parts if part != "*")


def compared(rows: Sequence[Row]) -> str:
    """What was compared, `12 gradients` or `1 output`; empty where nothing was."""
    tensors = {row.tensor for row in rows if row.tensor != "*"}
    if tensors and all(row.way.endswith("forms") for row in rows):
        return f"{len(tensors)} forms"
    gradients = sum(tensor.startswith("grad/") for tensor in tensors)
    # A gradient program's outputs are compared too; the gradients are what it is for.
    count, what = (gradients, "gradient") if gradients else (len(tensors), "output")
    return f"{count} {what}{'s' * (count > 1)}" if count else ""


def notes(report: Report, *, short: bool = False) -> list[str]:
    """The report's notes, and those on forms of backward that were not possible."""
    absent = untried(report.results)
    return [*report.notes, *(entry.line if short else entry.sentence for entry in absent)]


def counted(report: Report) -> str:
    """`12 pass, 1 fail`: how many rows have each verdict."""
    counts = ", ".join(f"{count} {name}" for name, count in report.summary.items() if count)
    return counts or "nothing compared"


def figure(value: float | None) -> str:
    """A share of a bound, or another figure near 1; empty for None."""
    if value is None:
        return ""
    if math.isinf(value):
        return "∞"
    if value < 10:
        return f"{value:.2f}"
    return f"{value:,.0f}" if value < 99_999 else f"{value:.1e}"


_PARDONABLE = 0.1  # of the truth's largest value


def hint(row: Row) -> str:
    """`would pass at --atol 1e-3` for a failure that a tolerance could pardon; empty otherwise.

    One that would pardon a tenth of the largest value there is, is no tolerance.
    """
    at, scale = row.would_pass_at, row.scale
    if row.verdict != "fail" or at is None or not math.isfinite(at):
        return ""
    if scale is not None and at > _PARDONABLE * scale:
        return ""
    return f"would pass at --atol {rounded_up(at)}"


def rounded_up(value: float) -> str:
    """To three digits, never below: what is printed has to suffice."""
    return f"{float(Context(prec=3, rounding=ROUND_CEILING).create_decimal(value)):.3g}"


def cause(diagnosis: Diagnosis) -> str:
    """Who is at fault, in words."""
    return _CAUSES[diagnosis.cause]


def diagnosis_text(diagnosis: Diagnosis) -> str:
    """A diagnosis in one line: where, who is at fault and why, and where it begins."""
    where = (diagnosis.runtime, diagnosis.artifact + way(diagnosis.way), diagnosis.case)
    text = f"{' · '.join(where)}: {cause(diagnosis)}: {diagnosis.reason}"
    found = diagnosis.divergence
    if found is None:
        return text
    within = f" in {found.module}" if found.module else ""
    error, allowed = "", ""
    if found.max_abs_error is not None:
        error = f", off by {found.max_abs_error:.3g}"
        if found.bound is not None and found.max_abs_error <= found.bound:
            error = ", beyond what is allowed in root mean square"
        elif found.bound is not None:
            allowed = f" where {found.bound:.3g} is allowed"
    alone = f" ({found.alone})" if found.alone else ""
    # What was looked into says the place in its reason, in words of its own.
    known = found.op in diagnosis.reason and found.module in diagnosis.reason
    begins = "" if known else f"begins at {found.op}{within}, {found.direction}: "
    return f"{text}; {begins}{found.tensor}{error}{allowed}{alone}"
