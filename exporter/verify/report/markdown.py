"""A report in GitHub's Markdown, for the summary of a step: never longer than is shown."""

from collections.abc import Iterable, Iterator

from fuseport.exporter.verify.report.model import Report, Row
from fuseport.exporter.verify.report.parts import (
    Group,
    compared,
    counted,
    diagnosis_text,
    figure,
    groups,
    hint,
    notes,
    way,
    worst_first,
)

__all__ = ["LIMIT", "to_markdown"]

LIMIT = 1024 * 1024 - 1024
"""Bytes. GitHub shows no summary of a step over 1 MiB, an error in its place."""

_LISTED = 100
_NAME = 120
_REASON = 600
_MARKS = {"pass": "✅", "fail": "❌", "error": "💥", "unsupported": "⚪"}
# Every character that Markdown, its tables or HTML may take for more than itself.
_SPECIAL = {ord(c): f"&#{ord(c)};" for c in "\\`*_[]<>#|~&@:$"}
_SPECIAL |= dict.fromkeys(map(ord, "\r\n\t"), " ")
_REST = "\n\n… there is more: see `--json` or `--html`.\n"


def to_markdown(report: Report, limit: int = LIMIT) -> str:
    """The report in a few tables, whole parts left out from the end where `limit` asks for it.

    Args:
        report: of any size.
        limit: bytes that the text may have.
    """
    room = limit - len(_REST.encode())
    kept: list[str] = []
    for part in _parts(report):
        room -= len(part.encode())
        if room < 0:
            return "".join((*kept, _REST)) if kept else ""
        kept.append(part)
    return "".join(kept)


def _parts(report: Report) -> Iterator[str]:
    """The text in parts that can be left out, from the end."""
    mark = _MARKS.get(report.verdict, "💥")
    yield (
        f"### {mark} fuseport verify: {report.verdict}\n\n"
        f"**{counted(report)}** in {report.seconds:.0f} s · {_code(report.bundle)}\n\n"
    )
    for note in notes(report, short=True):
        yield f"> {_plain(note, _REASON)}\n\n"
    for diagnosis in report.diagnoses[:_LISTED]:
        yield f"- **diagnosis** {_plain(diagnosis_text(diagnosis), _REASON)}\n"
    yield "\n| | runtime | artifact | compared | pass | error / bound | worst tensor |\n"
    yield "| --- | --- | --- | --- | ---: | ---: | --- |\n"
    for group in groups(report):
        yield _group(group)
    yield from _failures(report)


def _group(group: Group) -> str:
    passed = sum(row.verdict == "pass" for row in group.rows)
    worst = group.worst
    return _line(
        (
            _MARKS[group.verdict],
            _plain(group.runtime),
            _code(group.name) if group.name else "",
            compared(group.rows),
            f"{passed}/{len(group.rows)}",
            "" if worst is None else figure(worst.share),
            "" if worst is None else _code(worst.tensor),
        )
    )


def _failures(report: Report) -> Iterator[str]:
    rows = worst_first(report.results)
    if not rows:
        return
    yield f"\n<details{' open' if len(rows) <= 10 else ''}><summary>{len(rows)} "
    yield "rows that are no pass</summary>\n\n"
    yield "| | where | tensor | reason | error / bound |\n| --- | --- | --- | --- | ---: |\n"
    for row in rows[:_LISTED]:
        yield _failure(row)
    if len(rows) > _LISTED:
        yield f"\n… and {len(rows) - _LISTED} more.\n"
    yield "\n</details>\n"


def _failure(row: Row) -> str:
    where = (row.runtime, row.artifact, row.program + way(row.way), row.case)
    pardoned = hint(row)
    reason = (row.reason or "")[:_REASON] + (f"; {pardoned}" if pardoned else "")
    return _line(
        (
            _MARKS[row.verdict],
            _plain(" · ".join(part for part in where if part != "*"), 3 * _NAME),
            "" if row.tensor == "*" else _code(row.tensor),
            _plain(reason, 2 * _REASON),
            figure(row.share),
        )
    )


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def _plain(text: str, longest: int = _NAME) -> str:
    short = text if len(text) <= longest else text[: longest - 1] + "…"
    # Lone surrogates cannot be written to a file.
    safe = short.encode(errors="replace").decode().translate(_SPECIAL)
    return safe.replace("www.", "www&#46;")  # which GitHub makes a link of


def _code(text: str) -> str:
    return f"<code>{_plain(text)}</code>"
