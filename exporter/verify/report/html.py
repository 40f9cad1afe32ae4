"""A report as one HTML page: no network, no other file.

The words and tables of the page are made here, from `page/page.html.j2`; the list of all rows and
the maps of layers are drawn by its scripts, from the rows as JSON in the page.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fuseport.exporter.verify.report.model import FLOAT64, Report, Row
from fuseport.exporter.verify.report.parts import (
    Group,
    cause,
    compared,
    figure,
    groups,
    hint,
    notes,
    way,
    weight,
    worst_first,
)

__all__ = ["BINS", "Bar", "Failure", "histogram", "to_html"]

_PAGE = Path(__file__).parent / "page"
_FAILURES = 25
_WORST = 12

_LOWEST, _HIGHEST = -3, 1  # decades of error / bound that a histogram has
_PER_DECADE = 10
BINS = (_HIGHEST - _LOWEST) * _PER_DECADE + 2
"""Bins of a histogram; the first has all below them, zero too, and the last all above."""


@dataclass(frozen=True)
class Bar:
    """One bin of a histogram of error / bound.

    Attributes:
        bin: its number, from 0.
        count: rows in it.
        height: of the tallest bin's, in 0 to 1.
        beyond: whether it lies beyond the bound.
        said: what is in it, in words.
    """

    bin: int
    count: int
    height: float
    beyond: bool
    said: str


@dataclass(frozen=True)
class Failure:
    """A tensor that fails, or a job that could not be judged, wherever it does.

    Attributes:
        worst: the row that is furthest beyond its bound.
        count: of all such rows.
        runtimes: that have one.
    """

    worst: Row
    count: int
    runtimes: tuple[str, ...]


def to_html(report: Report) -> str:
    """The page, a few megabytes at most for ten thousand rows."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_PAGE), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    environment.filters |= {
        "figure": figure,
        "error": _error,
        "number": "{:,}".format,
        "sentence": lambda text: (text or "")[:1].upper() + (text or "")[1:],
    }
    # Truth held against truth is no candidate: it comes last.
    found = sorted(groups(report), key=lambda group: group.runtime == FLOAT64)
    failures = _failures(report)
    return environment.get_template("page.html.j2").render(
        report=report,
        notes=notes(report),
        total=len(report.results),
        groups=list(enumerate(found)),
        runtimes=list(dict.fromkeys(group.runtime for group in found)),
        failures=failures[:_FAILURES],
        failures_left=max(0, len(failures) - _FAILURES),
        worst=_worst_tensors(report.results),
        float64=FLOAT64,
        has_gradients=any(row.tensor.startswith("grad/") for row in report.results),
        environment=list(_flat(report.environment)),
        bins=BINS,
        bound=_PER_DECADE * -_LOWEST + 1,
        decades=[(_PER_DECADE * (d - _LOWEST) + 1, d) for d in range(_LOWEST, _HIGHEST + 1)],
        histogram=histogram,
        compared=compared,
        cause=cause,
        hint=hint,
        way=way,
        duration=_duration(report.seconds),
        data=_data(report, found),
        read=partial(_read, _PAGE),
    )


def histogram(group: Group) -> list[Bar]:
    """How the errors of a group's rows lie against their bounds, on a logarithmic scale."""
    counts = [0] * BINS
    for row in group.rows:
        if row.share is not None:
            counts[_bin(row.share)] += 1
    highest = max(counts)
    bound = _PER_DECADE * -_LOWEST + 1
    return [
        Bar(i, count, count / highest, i >= bound, f"{count:,} of error/bound {_range(i)}")
        for i, count in enumerate(counts)
        if count
    ]


def _bin(share: float) -> int:
    if share <= 0.0:
        return 0
    if math.isinf(share):
        return BINS - 1
    place = (math.log10(share) - _LOWEST) * _PER_DECADE
    # What takes all of its bound and no more is within it: the first bin beyond begins above 1.
    within = math.ceil(place) - 1 if share <= 1.0 else math.floor(place)
    return min(BINS - 1, max(0, within + 1))


def _range(number: int) -> str:
    edges = [10 ** (_LOWEST + i / _PER_DECADE) for i in range(BINS - 1)]
    if number == 0:
        return f"up to {edges[0]:.2g}"
    if number == BINS - 1:
        return f"from {edges[-1]:.2g}"
    return f"{edges[number - 1]:.2g} to {edges[number]:.2g}"


def _failures(report: Report) -> list[Failure]:
    """What failed or was in error, worst first, each tensor once."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in worst_first(report.results):
        if row.verdict != "unsupported":
            whole = (row.artifact, row.reason or "") if row.tensor == "*" else ()
            found.setdefault((row.verdict, row.tensor, *whole), []).append(row)
    return [
        Failure(rows[0], len(rows), tuple(dict.fromkeys(row.runtime for row in rows)))
        for rows in found.values()
    ]


def _worst_tensors(rows: Iterable[Row]) -> list[Row]:
    """For each tensor the row closest to its bound, or beyond it; the worst of these."""
    worst: dict[str, Row] = {}
    for row in rows:
        if row.share is not None and row.runtime != FLOAT64:
            before = worst.get(row.tensor)
            if before is None or weight(row) > weight(before):
                worst[row.tensor] = row
    return sorted(worst.values(), key=weight, reverse=True)[:_WORST]


def _data(report: Report, found: Sequence[Group]) -> dict[str, Any]:
    """All rows for the page's scripts: words once, by their numbers; figures to four digits."""
    words: dict[str, dict[str | None, int]] = {"case": {}, "tensor": {}, "reason": {}}

    def numbered(kind: str, word: str | None) -> int:
        return words[kind].setdefault(word, len(words[kind]))

    rows = [
        [
            number,
            numbered("case", row.case),
            numbered("tensor", row.tensor),
            row.verdict[0],
            _short(row.share),
            _short(row.max_abs_error),
            _short(row.bound),
            _short(row.rms_error),
            _short(row.rms_bound),
            _short(row.baseline_error),
            _short(row.scale),
            numbered("reason", row.reason),
            hint(row),
        ]
        for number, group in enumerate(found)
        for row in group.rows
    ]
    return {
        "groups": [
            {
                "runtime": group.runtime,
                "name": group.name,
                "artifact": group.artifact,
                "program": group.program,
                "provider": next((row.provider for row in group.rows if row.provider), None),
            }
            for group in found
        ],
        "float64": FLOAT64,
        **{f"{kind}s": list(numbers) for kind, numbers in words.items()},
        "rows": rows,
    }


def _short(value: float | None) -> float | str | None:
    """A figure in few characters; infinity, which JSON lacks, as a word that JavaScript reads."""
    if value is None or math.isnan(value):
        return None
    if math.isinf(value):
        return "Infinity"
    short = float(f"{value:.4g}")
    return int(short) if short.is_integer() and short < 1e6 else short


def _error(value: float | None) -> str:
    if value is None:
        return ""
    if math.isinf(value):
        return "∞"
    if value == 0.0 or 0.01 <= value < 10_000:
        return f"{value:.3g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _flat(environment: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    for key, value in environment.items():
        if isinstance(value, Mapping):
            yield from _flat(value)
        else:
            yield key, "none" if value is None else str(value)


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def _read(folder: Path, name: str) -> str:
    """A script or style sheet, into the page: none of them may end its own element."""
    text = (folder / name).read_text(encoding="utf-8")
    assert "</" not in text, name
    return text
