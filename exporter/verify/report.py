"""What a verification found: one dataclass, and its faces."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from fuseport.exporter.verify.compare import Verdict

__all__ = ["SCHEMA", "Report", "Row"]

SCHEMA = "fuseport.report/1"

_ORDER: tuple[Verdict, ...] = ("fail", "error", "unsupported", "pass")
_STYLES: Mapping[Verdict, str] = {
    "pass": "green",
    "fail": "bold red",
    "error": "bold magenta",
    "unsupported": "yellow",
}


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
    def group(self) -> tuple[str, str, str, str]:
        """What the table has one line for."""
        return (self.runtime, self.artifact, self.program, self.way)


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

        Nothing compared is an error, never a pass: 6 then, or 5 where all is unsupported.
        """
        rows = self.results
        if any(row.verdict == "fail" for row in rows):
            return 1
        if strict and any(row.verdict == "unsupported" for row in rows):
            return 1
        if any(row.verdict == "error" for row in rows):
            return 6
        if not any(row.verdict == "pass" for row in rows):
            return 5 if rows else 6
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

    def table(self) -> Table:
        """A line for each runtime, artifact and program: how many rows, and the closest call."""
        table = Table(header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
        for title in ("runtime", "artifact", "compared", "verdict"):
            table.add_column(title, no_wrap=True)
        for title in ("cases", "tensors"):
            table.add_column(title, justify="right", no_wrap=True)
        table.add_column("error / bound", justify="right", no_wrap=True)
        table.add_column("at worst in", overflow="fold")
        groups: dict[tuple[str, str, str, str], list[Row]] = {}
        for row in self.results:
            groups.setdefault(row.group, []).append(row)
        for (runtime, artifact, program, way), rows in groups.items():
            verdict = next(v for v in _ORDER if any(row.verdict == v for row in rows))
            tensors = {row.tensor for row in rows if row.tensor != "*"}
            gradients = {tensor for tensor in tensors if tensor.startswith("grad/")}
            what = f"{len(gradients)} gradients" if program == "gradient" else "outputs"
            share, worst = _closest(rows)
            table.add_row(
                runtime,
                artifact,
                f"{what}, autograd" if way == "autograd" else what,
                Text(verdict, style=_STYLES[verdict]),
                str(len({row.case for row in rows})),
                str(len(tensors)),
                share,
                Text(worst),
            )
        return table

    def failures(self) -> list[str]:
        """A line for each row that is no pass, worst verdicts first."""
        rows = [row for row in self.results if row.verdict != "pass"]
        rows.sort(key=lambda row: _ORDER.index(row.verdict))
        return [
            f"{row.verdict}: {row.runtime} · {row.artifact} · {row.program}"
            f"{' by autograd' if row.way == 'autograd' else ''} · {row.case} · {row.tensor}: "
            f"{row.reason}"
            for row in rows
        ]


def _closest(rows: Sequence[Row]) -> tuple[str, str]:
    """How much of its bound the worst tensor takes, and which it is."""
    shares = {row.tensor: 0.0 for row in rows if row.max_abs_error is not None}
    for row in rows:
        for error, bound in ((row.max_abs_error, row.bound), (row.rms_error, row.rms_bound)):
            if error and bound:
                shares[row.tensor] = max(shares[row.tensor], error / bound)
    if not shares:
        return "", next((row.reason for row in rows if row.reason), "")
    worst = max(shares, key=lambda tensor: shares[tensor])
    return f"{shares[worst]:.2f}", worst


def _finite(value: Any) -> Any:
    is_broken = isinstance(value, float) and value not in (value, float("inf"), float("-inf"))
    return None if is_broken or value in (float("inf"), float("-inf")) else value
