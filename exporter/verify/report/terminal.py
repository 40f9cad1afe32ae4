"""A report in the terminal: a table, and lines below it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

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
    notes,
    worst_first,
)

__all__ = ["failures", "lines", "table"]

_STYLES: Mapping[Verdict, str] = {
    "pass": "green",
    "fail": "bold red",
    "error": "bold magenta",
    "unsupported": "yellow",
}
_VERDICTS = {
    "pass": "equal within bounds",
    "fail": "not equal",
    "unsupported": "no runtime here can run it",
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
    found = [f"note: {note}" for note in notes(report, short=True)]
    found += (f"diagnosis: {diagnosis_text(d)}" for d in report.diagnoses[:_DIAGNOSED])
    found += _rest(len(report.diagnoses) - _DIAGNOSED, "diagnoses")
    rows = failures(report)
    found += rows[:_LISTED]
    found += _rest(len(rows) - _LISTED, "rows that are no pass")
    found += _left_out(report)
    told = _VERDICTS.get(report.verdict, report.verdict)
    return [*found, f"{told}: {counted(report)} in {report.seconds:.0f} s"]


def failures(report: Report) -> list[str]:
    """A line for each row that is no pass: the worst verdicts first, then the worst errors.

    What is unsupported for one reason in one artifact is one line.
    """
    alike: dict[tuple[str, ...], list[Row]] = {}
    for number, row in enumerate(worst_first(report.results)):
        of_artifact = row.runtime, row.artifact, str(row.reason)
        key = of_artifact if row.verdict == "unsupported" else (str(number),)
        alike.setdefault(key, []).append(row)
    return [_line(rows[0]) if len(rows) == 1 else _one_reason(rows) for rows in alike.values()]


def _one_reason(rows: Sequence[Row]) -> str:
    where = replace(rows[0], program="*", way="run", case="*", tensor="*")
    return f"{_line(where)} ({len(rows)} rows)"


def _left_out(report: Report) -> list[str]:
    """The runtimes of which all is unsupported, where others' results were compared."""
    verdicts: dict[str, set[str]] = {}
    for row in report.results:
        verdicts.setdefault(row.runtime, set()).add(row.verdict)
    left = [name for name, found in verdicts.items() if found == {"unsupported"}]
    if not left or len(left) == len(verdicts):
        return []
    return [f"nothing was compared in {', '.join(left)}: --strict makes that a mismatch"]


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
