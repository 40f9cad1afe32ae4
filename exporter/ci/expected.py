"""Failures that a `fuseport.toml` expects: which rows they excuse, and which of them are mended."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from fuseport.exporter.ci.config import Expected
from fuseport.exporter.verify.report import Report, Row

__all__ = ["Held", "excused", "hold"]

_FIELDS = ("runtime", "artifact", "program", "way", "case", "tensor")
_NAMED = 3


@dataclass(frozen=True)
class Held:
    """An expected failure, held against a report.

    Attributes:
        expected: it.
        rows: how many rows are as expected.
        mended: a sentence on rows that pass, which is a failure: so that it must be narrowed or
            taken out; None where there are none.
    """

    expected: Expected
    rows: int
    mended: str | None

    def content(self) -> dict[str, Any]:
        """As JSON data."""
        return {**asdict(self.expected), "rows": self.rows, "mended": self.mended}


def hold(expected: Sequence[Expected], report: Report) -> tuple[Held, ...]:
    """Each expected failure against the rows that it covers.

    One that passes, and no row at all, are failures of its own; not where its rows are unsupported
    here, since nothing is known then. Those of yet another verdict are not excused.
    """
    return tuple(_held(one, report.results) for one in expected)


def excused(expected: Sequence[Expected], report: Report) -> Report:
    """The report as a verdict should see it.

    Mismatches that are expected count as comparisons made and passed, expected rows without a
    comparison do not count, and an expected failure that is mended is a failing row of its own.
    """
    kept = [
        Row(one.expected.runtime, None, one.expected.artifact, one.expected.program, "expected",
            one.expected.case, one.expected.tensor, "fail",
            f"expected to {one.expected.verdict} ({one.expected.reason}), but {one.mended}")
        for one in hold(expected, report)
        if one.mended is not None
    ]  # fmt: skip
    for row in report.results:
        if not any(_covers(one, row) and one.verdict == row.verdict for one in expected):
            kept.append(row)
        elif row.verdict == "fail":
            kept.append(replace(row, verdict="pass"))
    return replace(report, results=tuple(kept))


def _held(expected: Expected, rows: Sequence[Row]) -> Held:
    covered = [row for row in rows if _covers(expected, row)]
    as_said = sum(row.verdict == expected.verdict for row in covered)
    passing = [row for row in covered if row.verdict == "pass"]
    untried = any(
        row.verdict == "unsupported"
        and fnmatchcase(row.runtime, expected.runtime)
        and row.artifact in ("*", expected.artifact)
        for row in rows
    )
    mended = None
    if passing:
        some = [
            " · ".join(getattr(row, name) for name in _FIELDS if getattr(row, name) != "*")
            for row in passing[:_NAMED]
        ]
        more = f" and {len(passing) - _NAMED} more" if len(passing) > _NAMED else ""
        mended = (
            f"{len(passing)} of {len(covered)} rows that it covers pass: take it out, or "
            f"narrow it; these pass: {'; '.join(some)}{more}"
        )
    elif not covered and not untried:
        mended = "it covers no row: take it out, or correct it"
    return Held(expected, as_said, mended)


def _covers(expected: Expected, row: Row) -> bool:
    return all(fnmatchcase(getattr(row, name), getattr(expected, name)) for name in _FIELDS)
