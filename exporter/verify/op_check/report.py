"""What the checks of ops found: a row for each op and check, and the faces of all rows."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from fuseport.exporter.verify.compare import Verdict

__all__ = ["SCHEMA", "OpReport", "OpRow"]

SCHEMA = "fuseport.ops/1"

_STYLES: Mapping[Verdict, str] = {
    "pass": "green",
    "fail": "bold red",
    "error": "bold magenta",
    "unsupported": "yellow",
}


@dataclass(frozen=True)
class OpRow:
    """One check of one op.

    Attributes:
        op: its name.
        check: what was checked.
        verdict: `fail` if one trial fails; `unsupported` where the op or the machine lacks what the
            check needs; `error` if nothing could be tried.
        reason: None for a pass; of a failure, its first trial's.
        trials: how many there were.
        failures: a line for each trial that failed, with the case that shows it.
        seconds: that it took.
    """

    op: str
    check: str
    verdict: Verdict
    reason: str | None
    trials: int
    failures: tuple[str, ...]
    seconds: float


@dataclass(frozen=True)
class OpReport:
    """All rows, and where they come from.

    Attributes:
        results: the rows.
        implementations: by op, what runs it here: `native` or `reference`.
        seed: of the values, and of the sample of cases.
        environment: versions and machine.
        seconds: how long it took.
    """

    results: tuple[OpRow, ...]
    implementations: Mapping[str, str]
    seed: int
    environment: Mapping[str, Any]
    seconds: float

    @property
    def summary(self) -> dict[str, int]:
        """How many rows have each verdict."""
        counts = Counter(row.verdict for row in self.results)
        return {verdict: counts[verdict] for verdict in ("pass", "fail", "unsupported", "error")}

    def exit_code(self) -> int:
        """0 pass, 1 a check failed, 6 one could not be made, 5 all is unsupported."""
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
            "implementations": dict(self.implementations),
            "results": [asdict(row) for row in self.results],
            "summary": self.summary,
        }
        return json.dumps(content, indent=1, ensure_ascii=False)

    def table(self) -> Table:
        """A line for each check, under its op."""
        table = Table(
            header_style="bold", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0)
        )
        for title in ("op, check", "verdict"):
            table.add_column(title, no_wrap=True)
        for title in ("trials", "seconds"):
            table.add_column(title, justify="right", no_wrap=True)
        op = None
        for row in self.results:
            if row.op != op:
                op = row.op
                table.add_row(Text(f"{op}, {self.implementations.get(op, 'absent')}", "bold"))
            verdict = Text(row.verdict, style=_STYLES[row.verdict])
            table.add_row(f"  {row.check}", verdict, str(row.trials), f"{row.seconds:.1f}")
        return table

    def lines(self) -> list[str]:
        """A line for each row that is no pass, and for each further trial that failed."""
        found = []
        for row in self.results:
            if row.verdict != "pass":
                found.append(f"{row.verdict}: {row.op}: {row.check}: {row.reason}")
                found += [f"  also: {failure}" for failure in row.failures[1:]]
        return found
