"""What came of a `fuseport.toml`: a verdict for each checkpoint, and one for all."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from fuseport.exporter.ci.expected import Held
from fuseport.exporter.verify.report import Report

__all__ = ["SCHEMA", "CiReport", "Outcome"]

SCHEMA = "fuseport.ci/1"

# Which exit code speaks for all: a mismatch first; then what was refused or could not be read,
# written or exported; then crashes; and what is missing last.
_FIRST = (1, 2, 3, 4, 7, 8, 6, 5)
_LISTED = 5
_VERDICTS = {0: "pass", 1: "fail", 5: "missing"}


@dataclass(frozen=True)
class Outcome:
    """What came of one checkpoint.

    Attributes:
        name: of the checkpoint in the file.
        path: of the checkpoint.
        code: the exit code that it would have alone.
        bundle: the folder; None where none could be exported.
        reused: whether the bundle is of an earlier run.
        report: None where nothing could be verified.
        judged: the same, as `code` saw it: what is expected is no failure.
        expected: its expected failures, held against the report.
        notes: of its export and of its verification.
        error: what ended it before a report; with findings that belong to it.
        details: the findings, a line each.
    """

    name: str
    path: str
    code: int
    bundle: str | None = None
    reused: bool = False
    report: Report | None = None
    judged: Report | None = None
    expected: tuple[Held, ...] = ()
    notes: tuple[str, ...] = ()
    error: str | None = None
    details: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """In a word: `pass`, `fail`, `missing` or `error`."""
        return _VERDICTS.get(self.code, "error")

    @property
    def excused(self) -> int:
        """How many rows are as an expected failure says."""
        return sum(held.rows for held in self.expected)

    def content(self) -> dict[str, Any]:
        """As JSON data; the rows are in a file of their own."""
        return {
            "name": self.name,
            "path": self.path,
            "verdict": self.verdict,
            "exit_code": self.code,
            "bundle": self.bundle,
            "reused": self.reused,
            "report": None if self.report is None else f"{self.name}.json",
            "summary": None if self.report is None else self.report.summary,
            "expected": [held.content() for held in self.expected],
            "notes": list(self.notes),
            "error": self.error,
            "details": list(self.details),
        }

    def lines(self) -> list[str]:
        """A line for each note and each finding that is no pass, and for each expected failure."""
        if self.error is not None:
            return [f"{self.name}: {self.error}", *(f"  {line}" for line in self.details)]
        assert self.judged is not None
        found = [f"{self.name}: note: {note}" for note in self.notes]
        failures = self.judged.failures()
        found += (f"{self.name}: {line}" for line in failures[:_LISTED])
        if len(failures) > _LISTED:
            found.append(f"{self.name}: … and {len(failures) - _LISTED} more in {self.name}.json")
        found += (f"{self.name}: {line}" for line in self.judged.left_out())
        for held in self.expected:
            if held.rows:
                found.append(f"{self.name}: {held.rows} rows as expected: {held.expected.reason}")
        return found


@dataclass(frozen=True)
class CiReport:
    """What came of all of them.

    Attributes:
        config: the file.
        outcomes: of the checkpoints, in the file's order.
        environment: versions and machine.
        seconds: how long it took.
    """

    config: str
    outcomes: tuple[Outcome, ...]
    environment: Mapping[str, Any]
    seconds: float

    def exit_code(self) -> int:
        """0 if every checkpoint passes; else a mismatch before an error, before what is missing."""
        codes = {outcome.code for outcome in self.outcomes}
        return next((code for code in _FIRST if code in codes), 0 if codes == {0} else 6)

    def to_json(self) -> str:
        """JSON, version 1."""
        content = {
            "schema": SCHEMA,
            "config": self.config,
            "environment": dict(self.environment),
            "seconds": round(self.seconds, 3),
            "exit_code": self.exit_code(),
            "checkpoints": [outcome.content() for outcome in self.outcomes],
        }
        return json.dumps(content, indent=1, ensure_ascii=False)

    def table(self) -> Table:
        """A line for each checkpoint."""
        table = Table(
            header_style="bold", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0)
        )
        for title in ("checkpoint", "verdict"):
            table.add_column(title, no_wrap=True)
        for title in _COUNTS:
            table.add_column(title, justify="right", no_wrap=True)
        for outcome in self.outcomes:
            style = "green" if outcome.code == 0 else "bold red"
            table.add_row(outcome.name, Text(outcome.verdict, style), *_counts(outcome))
        return table

    def lines(self) -> list[str]:
        """What the table does not say, checkpoint by checkpoint."""
        return [line for outcome in self.outcomes for line in outcome.lines()]

    def markdown(self) -> str:
        """A summary for `$GITHUB_STEP_SUMMARY`."""
        rows = [["checkpoint", "verdict", *_COUNTS], ["---"] * (2 + len(_COUNTS))]
        rows += [
            [f"`{o.name}`", ("✅ " if o.code == 0 else "❌ ") + o.verdict, *_counts(o)]
            for o in self.outcomes
        ]
        table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        lines = "\n".join(f"- {_escaped(line)}" for line in self.lines())
        return f"## fuseport ci\n\n{table}\n\n{lines}\n"


_COUNTS = ("pass", "fail", "expected", "unsupported", "error")


def _counts(outcome: Outcome) -> Sequence[str]:
    if outcome.report is None:
        return [""] * len(_COUNTS)
    mended = sum(held.mended is not None for held in outcome.expected)
    counts = {**outcome.report.summary, "expected": outcome.excused}
    counts["fail"] += mended
    return [str(counts[name] or "") for name in _COUNTS]


def _escaped(line: str) -> str:
    """Markdown would take `*` of a pattern and `<` of a repr for its own."""
    for sign in "\\`*_<>|":
        line = line.replace(sign, f"\\{sign}")
    return line
