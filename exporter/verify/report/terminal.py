"""A report in the terminal: a table, and lines below it."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from rich import box
from rich.table import Table
from rich.text import Text

from fuseport.exporter.verify.compare import Verdict
from fuseport.exporter.verify.diagnosis import Diagnosis
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
    way,
    worst_first,
)

__all__ = ["failures", "left_out", "lines", "table"]

_STYLES: Mapping[Verdict, str] = {
    "pass": "green",
    "fail": "bold red",
    "error": "bold magenta",
    "unsupported": "yellow",
}
_VERDICTS = {
    "pass": "equal within bounds",
    "fail": "not equal",
    "unsupported": "no artifact could be compared, float64 alone with itself",
}
_OTHERS = 61  # columns of a table beside the names of tensors
_SHORTEST = 12  # of these names
_LISTED = 20
_EACH = 3  # rows of one artifact in one runtime that have a line each
_DIAGNOSED = 5


def table(report: Report, width: int = 80) -> Table:
    """A line for each artifact in each runtime, with its worst tensor: closest to its bound."""
    room = max(_SHORTEST, width - _OTHERS)
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
            Text(f"  {group.name or _whole(group.rows)}"),
            compared(group.rows),
            Text(group.verdict, style=_STYLES[group.verdict]),
            *_closest(group, room),
        )
    return made


def lines(report: Report) -> list[str]:
    """What stands below the table: notes, diagnoses, the worst rows, and the sum of it."""
    found = [f"note: {note}" for note in notes(report, short=True)]
    places = _places(report.diagnoses)
    found += (f"diagnosis: {_of_place(place)}" for place in places[:_DIAGNOSED])
    found += _rest(len(places) - _DIAGNOSED, "diagnoses")
    rows = _gathered(worst_first(report.results))
    found += rows[:_LISTED]
    found += _rest(len(rows) - _LISTED, "of what is no pass")
    found += left_out(report)
    told = _VERDICTS.get(report.verdict, report.verdict)
    programs = {row.program for row in report.results} - {"*"}
    if report.verdict == "unsupported" and programs - {*report.uncompared()}:
        told = f"nothing was compared of {' and '.join(report.uncompared())}"
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


def _whole(rows: Sequence[Row]) -> str:
    """What rows of no artifact are of: cases, or all that a runtime would run."""
    cases = {row.case for row in rows if row.case != "*"}
    return "all" if not cases else f"{len(cases)} case{'s' * (len(cases) > 1)}"


def left_out(report: Report) -> list[str]:
    """The runtimes of which all is unsupported, where others' results were compared, and files."""
    verdicts: dict[str, set[str]] = {}
    for row in report.results:
        verdicts.setdefault(row.runtime, set()).add(row.verdict)
    asked = {row.runtime for row in report.results if row.artifact != "*" or row.case == "*"}
    left = [name for name, found in verdicts.items() if found == {"unsupported"}]
    if len(left) == len(verdicts):
        return []
    files: dict[str, set[str]] = {}
    for row in report.results:
        if row.runtime not in left and row.artifact != "*" and not row.way.endswith("forms"):
            files.setdefault(f"{row.artifact}{way(row.way)}", set()).add(row.verdict)
    absent = [name for name in left if name in asked]  # of others, the model refuses cases
    lacking = [f"in {', '.join(absent)}"] if absent else []
    unseen = [name for name, found in files.items() if found == {"unsupported"}]
    lacking += [f"of {', '.join(unseen)}"] if unseen else []
    told = ", nor ".join(lacking)
    return [f"nothing was compared {told}: --strict makes that a mismatch"] if told else []


def _places(diagnoses: Sequence[Diagnosis]) -> list[list[Diagnosis]]:
    """Those of one artifact that blame the same, at the same place, together."""
    alike: dict[object, list[Diagnosis]] = {}
    for number, one in enumerate(diagnoses):
        at = one.divergence
        place = number if at is None else (at.tensor, at.op, at.direction)
        alike.setdefault((one.artifact, one.program, one.way, one.cause, place), []).append(one)
    return list(alike.values())


def _of_place(diagnoses: Sequence[Diagnosis]) -> str:
    """The first of them, and where else the same was found."""
    first, *others = diagnoses
    text = diagnosis_text(first)
    if not others:
        return text
    spread = _spread(runtimes={d.runtime for d in diagnoses}, cases={d.case for d in diagnoses})
    told = [f"the same in {len(others)} more", *spread]
    return f"{text} ({', '.join(told)})"


def _gathered(rows: Sequence[Row]) -> list[str]:
    """A line for each artifact in each runtime, where one cause makes most of its rows fail.

    A few rows have a line each; of what is unsupported, or died, each reason has one.
    """
    alike: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        cause = (row.program, row.way) if row.verdict == "fail" else (str(row.reason),)
        alike.setdefault((row.verdict, row.runtime, row.artifact, *cause), []).append(row)
    found: list[str] = []
    for group in alike.values():
        if group[0].verdict == "unsupported" and len(group) > 1:
            found.append(_one_reason(group))
        elif len(group) <= _EACH:
            found += map(_line, group)
        else:
            found.append(_worst_of(group))
    return found


def _worst_of(rows: Sequence[Row]) -> str:
    """The first of rows, how many there are, and what would pardon all of them."""
    worst = rows[0]
    spread = _spread(tensors={r.tensor for r in rows}, cases={r.case for r in rows})
    told = [f"the worst of {len(rows)} rows", *spread]
    pardons = [row.would_pass_at for row in rows if row.would_pass_at is not None]
    if len(pardons) == len(rows) and (pardoned := hint(replace(worst, would_pass_at=max(pardons)))):
        told.append(f"all {pardoned}")
    return f"{worst.verdict}: {located(worst)}: {worst.reason} ({', '.join(told)})"


def _spread(**found: Collection[str]) -> list[str]:
    """How many there are of each kind, of those that are several."""
    return [f"{len(names)} {what}" for what, names in found.items() if len(names) > 1]


def _one_reason(rows: Sequence[Row]) -> str:
    where = replace(rows[0], program="*", way="run", case="*", tensor="*")
    return f"{_line(where)} ({len(rows)} rows)"


def _line(row: Row) -> str:
    pardoned = hint(row)
    return f"{row.verdict}: {located(row)}: {row.reason}" + f"; {pardoned}" * bool(pardoned)


def _rest(count: int, what: str) -> list[str]:
    return [f"… and {count} more {what}: --json and --html have all"] if count > 0 else []


def _closest(group: Group, room: int) -> tuple[str, Text]:
    """How much of its bound the worst tensor takes, and which it is, at its end if it is long."""
    worst = group.worst
    if worst is None:
        return "", Text("")
    name = worst.tensor
    short = name if len(name) <= room else "…" + name[1 - room :]
    return figure(worst.share), Text(short)
