"""A report in the terminal: a table, and lines below it."""

from collections.abc import Mapping

from rich import box
from rich.table import Table
from rich.text import Text

from fuseport.exporter.verify.compare import Verdict
from fuseport.exporter.verify.report.model import Report, Row
from fuseport.exporter.verify.report.parts import (
    Group,
    compared,
    counted,
    diagnosis_text,
    figure,
    groups,
    hint,
    located,
    worst_first,
)

__all__ = ["failures", "lines", "table"]

_STYLES: Mapping[Verdict, str] = {
    "pass": "green",
    "fail": "bold red",
    "error": "bold magenta",
    "unsupported": "yellow",
}
_NAME_WIDTH = 19  # of a tensor in the table, so that it fits a terminal of 80 columns
_LISTED = 20
_DIAGNOSED = 5


def table(report: Report) -> Table:
    """A line for each artifact in each runtime, with its worst tensor: closest to its bound."""
    made = Table(header_style="bold", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for title in ("runtime, artifact", "compared", "verdict"):
        made.add_column(title, no_wrap=True)
    made.add_column("err/bound", justify="right", no_wrap=True)
    made.add_column("worst tensor", no_wrap=True)
    before = None
    for group in groups(report):
        if group.runtime != before:
            made.add_row(Text(group.runtime, style="bold"))
            before = group.runtime
        made.add_row(
            Text(f"  {group.name}"),
            compared(group.rows),
            Text(group.verdict, style=_STYLES[group.verdict]),
            *_closest(group),
        )
    return made


def lines(report: Report) -> list[str]:
    """What stands below the table: notes, diagnoses, the worst rows, and the sum of it."""
    found = [f"note: {note}" for note in report.notes]
    found += (f"diagnosis: {diagnosis_text(d)}" for d in report.diagnoses[:_DIAGNOSED])
    found += _rest(len(report.diagnoses) - _DIAGNOSED, "diagnoses")
    rows = failures(report)
    found += rows[:_LISTED]
    found += _rest(len(rows) - _LISTED, "rows that are no pass")
    return [*found, f"{counted(report)} in {report.seconds:.0f} s"]


def failures(report: Report) -> list[str]:
    """A line for each row that is no pass: the worst verdicts first, then the worst errors."""
    return [_line(row) for row in worst_first(report.results)]


def _line(row: Row) -> str:
    pardoned = hint(row)
    return f"{row.verdict}: {located(row)}: {row.reason}" + f"; {pardoned}" * bool(pardoned)


def _rest(count: int, what: str) -> list[str]:
    return [f"… and {count} more {what}: --json and --html have all"] if count > 0 else []


def _closest(group: Group) -> tuple[str, Text]:
    """How much of its bound the worst tensor takes, and which it is."""
    worst = group.worst
    if worst is None:
        return "", Text("")
    name = worst.tensor
    short = name if len(name) <= _NAME_WIDTH else "…" + name[1 - _NAME_WIDTH :]
    return figure(worst.share), Text(short)
