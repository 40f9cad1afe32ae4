"""What a verification found: one dataclass, and its faces."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from fuseport.exporter.errors import CorruptInput
from fuseport.exporter.verify.compare import Verdict

__all__ = ["FLOAT64", "SCHEMA", "Report", "Row"]

SCHEMA = "fuseport.report/1"

FLOAT64 = "float64"
"""The name that stands in the runtime's place where truth is held against stored truth."""

_ORDER: tuple[Verdict, ...] = ("fail", "error", "unsupported", "pass")
_STYLES: Mapping[Verdict, str] = {
    "pass": "green",
    "fail": "bold red",
    "error": "bold magenta",
    "unsupported": "yellow",
}
_NAME_WIDTH = 19  # of a tensor in the table, so that it fits a terminal of 80 columns


@dataclass(frozen=True)
class Row:
    """One tensor of one program, case and runtime.

    `tensor` is `*` where the whole job has one verdict. `way` says how a gradient was had: `run` of
    a gradient program, or `autograd` through a forward one. `crash` marks an error of a runtime
    that died. The figures are those of `compare.Judgement`.
    """

    runtime: str
    provider: str | None
    artifact: str
    program: str
    way: str
    case: str
    tensor: str
    verdict: Verdict
    reason: str | None = None
    crash: bool = False
    max_abs_error: float | None = None
    rms_error: float | None = None
    baseline_error: float | None = None
    bound: float | None = None
    rms_bound: float | None = None
    would_pass_at: float | None = None

    @property
    def share(self) -> float | None:
        """How much of its bound the error takes: above 1 it fails. None where there is no error."""
        shares = [
            math.inf if bound == 0.0 else error / bound
            for error, bound in (
                (self.max_abs_error, self.bound),
                (self.rms_error, self.rms_bound),
            )
            if error and bound is not None
        ]
        return max(shares, default=None if self.max_abs_error is None else 0.0)


@dataclass(frozen=True)
class Report:
    """All rows of a verification, and where it ran.

    Attributes:
        bundle: the folder, as given.
        manifest_sha256: of its manifest.
        environment: versions and machine.
        seconds: how long it took.
        results: the rows.
        notes: what the reader should know, a sentence each.
    """

    bundle: str
    manifest_sha256: str
    environment: Mapping[str, Any]
    seconds: float
    results: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    @property
    def summary(self) -> dict[str, int]:
        """How many rows have each verdict."""
        counts = Counter(row.verdict for row in self.results)
        return {verdict: counts[verdict] for verdict in ("pass", "fail", "unsupported", "error")}

    def exit_code(self, *, strict: bool = False) -> int:
        """0 pass, 1 mismatch, 6 a runtime crashed; the first of these that applies.

        Nothing compared is an error, never a pass: 6 then, or 5 where all is unsupported. That
        float64 agrees with itself is no comparison.
        """
        verdicts = {row.verdict for row in self.results}
        compared = {row.verdict for row in self.results if row.runtime != FLOAT64}
        if "fail" in verdicts or (strict and "unsupported" in verdicts):
            return 1
        if "error" in verdicts:
            return 6
        if "pass" not in compared:
            return 5 if "unsupported" in compared else 6
        return 0

    def to_json(self) -> str:
        """JSON, version 1: see README. Infinity and NaN, which JSON lacks, are null."""
        content = {
            "schema": SCHEMA,
            "bundle": self.bundle,
            "manifest_sha256": self.manifest_sha256,
            "environment": dict(self.environment),
            "seconds": round(self.seconds, 3),
            "notes": list(self.notes),
            "results": [{k: _finite(v) for k, v in asdict(row).items()} for row in self.results],
            "summary": self.summary,
        }
        return json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> "Report":
        """A report that `to_json` wrote.

        Raises:
            CorruptInput: it is not one.
        """
        try:
            content = json.loads(text)
            if content.pop("schema") != SCHEMA:
                raise ValueError(f"not of the schema {SCHEMA}")
            del content["summary"]
            rows = tuple(Row(**row) for row in content.pop("results"))
            return cls(**{**content, "notes": tuple(content["notes"]), "results": rows})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptInput(f"no report of fuseport: {error}") from error

    def table(self) -> Table:
        """A line for each artifact in each runtime, with its worst tensor: closest to its bound."""
        table = Table(
            header_style="bold", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0)
        )
        for title in ("runtime, artifact", "compared", "verdict"):
            table.add_column(title, no_wrap=True)
        table.add_column("err/bound", justify="right", no_wrap=True)
        table.add_column("worst tensor", no_wrap=True)
        for runtime, rows in _grouped(self.results, lambda row: row.runtime):
            table.add_row(Text(runtime, style="bold"))
            for (name, _, way), part in _grouped(rows, lambda r: (r.artifact, r.program, r.way)):
                verdict = next(v for v in _ORDER if any(row.verdict == v for row in part))
                share, worst = _closest(part)
                table.add_row(
                    ("  " if name == "*" else f"  {name}") + ", autograd" * (way == "autograd"),
                    _compared(part),
                    Text(verdict, style=_STYLES[verdict]),
                    share,
                    Text(worst),
                )
        return table

    def failures(self) -> list[str]:
        """A line for each row that is no pass: the worst verdicts first, then the worst errors."""
        rows = [row for row in self.results if row.verdict != "pass"]
        rows.sort(key=lambda row: (_ORDER.index(row.verdict), -_weight(row)))
        return [_line(row) for row in rows]


def _line(row: Row) -> str:
    way = "by autograd" if row.way == "autograd" else "*"
    parts = (row.runtime, row.artifact, row.program, way, row.case, row.tensor)
    where = " · ".join(part for part in parts if part != "*")
    hint = ""
    if row.verdict == "fail" and row.would_pass_at is not None and math.isfinite(row.would_pass_at):
        hint = f"; would pass at --atol {row.would_pass_at:.3g}"
    return f"{row.verdict}: {where}: {row.reason}{hint}"


def _grouped(rows: Iterable[Row], key: Any) -> list[tuple[Any, list[Row]]]:
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return list(groups.items())


def _compared(rows: Sequence[Row]) -> str:
    tensors = {row.tensor for row in rows if row.tensor != "*"}
    gradients = sum(tensor.startswith("grad/") for tensor in tensors)
    # A gradient program's outputs are compared too; the gradients are what it is for.
    count, what = (gradients, "gradient") if gradients else (len(tensors), "output")
    if not count:
        return ""
    return f"{count} {what}{'s' * (count > 1)}"


def _closest(rows: Sequence[Row]) -> tuple[str, str]:
    """How much of its bound the worst tensor takes, and which it is."""
    # A failure without figures, of another shape for example, is worse than any with.
    for row in rows:
        if row.verdict == "fail" and row.share is None:
            return "", _short(row.tensor)
    measured = [row for row in rows if row.share is not None]
    if not measured:
        return "", ""
    worst = max(measured, key=_weight)
    share = _weight(worst)
    return f"{share:.2g}" if share >= 10 else f"{share:.2f}", _short(worst.tensor)


def _weight(row: Row) -> float:
    return math.inf if row.share is None else row.share


def _short(tensor: str) -> str:
    return tensor if len(tensor) <= _NAME_WIDTH else "…" + tensor[1 - _NAME_WIDTH :]


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
