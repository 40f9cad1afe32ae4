"""What the vocabulary suite found: a row for each case, program and runtime."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from fuseport.exporter.verify.compare import Verdict

__all__ = ["SCHEMA", "PlainRow", "VocabularyReport"]

SCHEMA = "fuseport.vocabulary/1"

_STYLES: Mapping[Verdict, str] = {
    "pass": "green",
    "fail": "bold red",
    "error": "bold magenta",
    "unsupported": "yellow",
}
_ORDER: tuple[Verdict, ...] = ("fail", "error", "unsupported", "pass")


@dataclass(frozen=True)
class PlainRow:
    """One case of an operator in one runtime: one program, run one way.

    Attributes:
        operator, case: their names; `*` where a runtime is not there at all.
        runtime: its name.
        program: `forward` or `gradient`.
        way: `run` the program, or `autograd` through the forward one.
        verdict: the worst of its tensors'.
        reason: None for a pass.
        found: what came of it, where an exception is stated for it.
        share: how much of its bound the largest error takes; None where nothing was compared.
    """

    operator: str
    case: str
    runtime: str
    program: str
    way: str
    verdict: Verdict
    reason: str | None = None
    found: str | None = None
    share: float | None = None


@dataclass(frozen=True)
class VocabularyReport:
    """All rows, and where they come from.

    Attributes:
        results: the rows.
        cases: how many there are, by operator.
        seed: of the values.
        environment: versions and machine.
        seconds: how long it took.
    """

    results: tuple[PlainRow, ...]
    cases: Mapping[str, int]
    seed: int
    environment: Mapping[str, Any]
    seconds: float

    @property
    def summary(self) -> dict[str, int]:
        """How many rows have each verdict."""
        return _counts(self.results)

    @property
    def by_runtime(self) -> dict[str, dict[str, int]]:
        """The same, by runtime."""
        names = dict.fromkeys(row.runtime for row in self.results)
        return {n: _counts(row for row in self.results if row.runtime == n) for n in names}

    def exit_code(self) -> int:
        """0 pass, 1 a row failed, 6 one could not be judged, 5 all is unsupported."""
        verdicts = {row.verdict for row in self.results}
        if "fail" in verdicts:
            return 1
        if "error" in verdicts or not verdicts:
            return 6
        return 0 if "pass" in verdicts else 5

    def to_json(self) -> str:
        """JSON, version 1."""
        content = {
            "schema": SCHEMA,
            "environment": dict(self.environment),
            "seed": self.seed,
            "seconds": round(self.seconds, 3),
            "cases": dict(self.cases),
            "results": [asdict(row) for row in self.results],
            "summary": self.summary,
            "by_runtime": self.by_runtime,
        }
        return json.dumps(content, indent=1, ensure_ascii=False)

    def table(self) -> Table:
        """A line for each operator, a column for each runtime: forward and gradient."""
        runtimes = list(self.by_runtime)
        table = Table(
            header_style="bold", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0)
        )
        table.add_column("operator", no_wrap=True)
        table.add_column("cases", justify="right", no_wrap=True)
        for runtime in runtimes:
            table.add_column(runtime, no_wrap=True)
        for operator, count in self.cases.items():
            own = [row for row in self.results if row.operator in (operator, "*")]
            cells = (_cell([row for row in own if row.runtime == runtime]) for runtime in runtimes)
            table.add_row(operator, str(count), *cells)
        return table

    def lines(self) -> list[str]:
        """A line for each failure and error, then one for each reason that something lacks."""
        found = [
            f"{row.verdict}: {row.runtime}: {row.operator}, {row.case}, {_what(row)}: {row.reason}"
            for verdict in ("fail", "error")
            for row in self.results
            if row.verdict == verdict
        ]
        lacking = Counter(
            (row.runtime, row.operator, row.program, row.reason)
            for row in self.results
            if row.verdict == "unsupported"
        )
        for (runtime, operator, program, reason), count in lacking.items():
            cases = f"{count} case{'s' * (count > 1)}"
            found.append(f"unsupported: {runtime}: {operator}, {program}, {cases}: {reason}")
        counts = ", ".join(f"{count} {verdict}" for verdict, count in self.summary.items() if count)
        found.append(
            f"{len(self.cases)} operators, {sum(self.cases.values())} cases: "
            f"{counts or 'nothing'} in {self.seconds:.0f} s"
        )
        return found


def _counts(rows: Iterable[PlainRow]) -> dict[str, int]:
    counts = Counter(row.verdict for row in rows)
    return {verdict: counts[verdict] for verdict in ("pass", "fail", "unsupported", "error")}


def _what(row: PlainRow) -> str:
    return row.program + ", autograd" * (row.way == "autograd")


def _cell(rows: list[PlainRow]) -> Text:
    """The worst verdict, and how many rows have it where not all do."""
    if not rows:
        return Text("-")
    worst = next(v for v in _ORDER if any(row.verdict == v for row in rows))
    count = sum(row.verdict == worst for row in rows)
    return Text(worst + f" {count}/{len(rows)}" * (worst != "pass"), style=_STYLES[worst])
