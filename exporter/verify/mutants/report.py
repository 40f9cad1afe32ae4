"""What became of planted bugs and of clean runs: two figures, and a line for each that is wrong."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

__all__ = ["SCHEMA", "WANTED", "Clean", "Planted", "Power"]

SCHEMA = "fuseport.power/1"

WANTED = 0.99
"""The share of the planted bugs that has to be caught."""


@dataclass(frozen=True)
class Planted:
    """A bug that was planted.

    Attributes:
        op: what it was planted in: an op, or a runtime with one of a bundle's files.
        kind: of the catalogue.
        where: `forward`, `gradient`, `fake`, `lowering` or `artifact`.
        operator: or function, or file, that was changed.
        place: in it.
        caught_by: the check, or the tensor, that showed it; None if nothing did.
        reason: what that said; of a miss, why it cannot be seen.
        equivalent: why it is no bug in this place, by mathematics; None for all others.
    """

    op: str
    kind: str
    where: str
    operator: str
    place: str
    caught_by: str | None
    reason: str | None
    equivalent: str | None = None

    @property
    def label(self) -> str:
        """Which it is."""
        return f"{self.op}: {self.kind}: {self.operator}: {self.place}"


@dataclass(frozen=True)
class Clean:
    """A run of what nothing was planted in.

    Attributes:
        op: or runtime, with a file of a bundle.
        check: what was checked; of a bundle, the case.
        dtype: of the values.
        seed: of the values.
        trials: how many comparisons it consists of.
        alarm: what it said was wrong; None, as it has to be.
    """

    op: str
    check: str
    dtype: str
    seed: int
    trials: int
    alarm: str | None


@dataclass(frozen=True)
class Power:
    """How much of what is wrong is seen, and how often something is that is not.

    Attributes:
        planted: every bug.
        clean: every run of what is right.
        seed: of values and of drawn places.
        environment: versions and machine.
        seconds: how long it took.
        notes: what the reader should know, a sentence each.
        lost: files of which wrong copies could not be made, or not all.
    """

    planted: tuple[Planted, ...]
    clean: tuple[Clean, ...]
    seed: int
    environment: Mapping[str, Any]
    seconds: float
    notes: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()

    @cached_property
    def counted(self) -> tuple[Planted, ...]:
        """The bugs but those that are none, by mathematics."""
        return tuple(p for p in self.planted if p.equivalent is None)

    @cached_property
    def missed(self) -> tuple[Planted, ...]:
        """The bugs that nothing showed."""
        return tuple(p for p in self.counted if p.caught_by is None)

    @cached_property
    def refuted(self) -> tuple[Planted, ...]:
        """Those that are said to be none, and that a check saw all the same: the data is wrong."""
        return tuple(p for p in self.planted if p.equivalent is not None and p.caught_by)

    @cached_property
    def alarms(self) -> tuple[Clean, ...]:
        """The clean runs that said something was wrong."""
        return tuple(c for c in self.clean if c.alarm is not None)

    @property
    def caught(self) -> int:
        """How many of `counted` were seen."""
        return len(self.counted) - len(self.missed)

    def exit_code(self) -> int:
        """0 where at least 99 % are caught and nothing is a false alarm, 1 where not.

        6 where nothing ran, or some files were not tried.
        """
        if not self.counted or not self.clean:
            return 6
        enough = self.caught >= WANTED * len(self.counted)
        if not enough or self.alarms or self.refuted:
            return 1
        return 6 if self.lost else 0

    def to_json(self) -> str:
        """JSON, version 1."""
        content = {
            "schema": SCHEMA,
            "environment": dict(self.environment),
            "seed": self.seed,
            "seconds": round(self.seconds, 3),
            "notes": list(self.notes),
            "lost": list(self.lost),
            "summary": self.summary,
            "kinds": self.kinds,
            "missed": [asdict(p) for p in self.missed],
            "equivalent": [asdict(p) for p in self.planted if p.equivalent is not None],
            "alarms": [asdict(c) for c in self.alarms],
            "planted": [asdict(p) for p in self.planted],
            "clean": [asdict(c) for c in self.clean],
        }
        return json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False)

    @property
    def summary(self) -> dict[str, int]:
        """The figures."""
        return {
            "caught": self.caught,
            "planted": len(self.counted),
            "equivalent": len(self.planted) - len(self.counted),
            "false_alarms": len(self.alarms),
            "clean_runs": len(self.clean),
            "clean_comparisons": sum(c.trials for c in self.clean),
        }

    @property
    def kinds(self) -> list[dict[str, Any]]:
        """By kind: how many were planted and caught, and by what."""
        found: list[dict[str, Any]] = []
        for kind, where in dict.fromkeys((p.kind, p.where) for p in self.counted):
            own = [p for p in self.counted if (p.kind, p.where) == (kind, where)]
            by = Counter(p.caught_by for p in own if p.caught_by is not None)
            found.append(
                {
                    "kind": kind,
                    "where": where,
                    "planted": len(own),
                    "caught": sum(by.values()),
                    "by": dict(by.most_common()),
                }
            )
        return found

    def table(self) -> Table:
        """A line for each kind of bug."""
        table = Table(
            header_style="bold", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0)
        )
        table.add_column("planted bug", no_wrap=True)
        table.add_column("caught", justify="right", no_wrap=True)
        table.add_column("by", no_wrap=True)
        where = None
        for row in sorted(self.kinds, key=lambda row: _ORDER.index(row["where"])):
            if row["where"] != where:
                where = row["where"]
                table.add_row(Text(where, "bold"))
            all_of_them = row["caught"] == row["planted"]
            count = Text(
                f"{row['caught']}/{row['planted']}", "green" if all_of_them else "bold red"
            )
            by = ", ".join(f"{name} {n}" for name, n in list(row["by"].items())[:_NAMED])
            more = len(row["by"]) - _NAMED
            table.add_row(f"  {row['kind']}", count, by + (f", {more} more" if more > 0 else ""))
        return table

    def lines(self) -> list[str]:
        """Misses and false alarms, a line each; then the figures."""
        found = [f"missed: {p.label}: {p.reason}" for p in self.missed]
        found += [
            f"no bug: {p.label}: {p.equivalent}" for p in self.planted if p.equivalent is not None
        ]
        found += [
            f"said to be no bug, and seen by {p.caught_by}: {p.label}: {p.reason}"
            for p in self.refuted
        ]
        found += [
            f"false alarm: {c.op}: {c.check}: {c.dtype}, seed {c.seed}: {c.alarm}"
            for c in self.alarms
        ]
        found += [f"note: {note}" for note in self.notes]
        counts = self.summary
        share = counts["caught"] / counts["planted"] if counts["planted"] else 0.0
        found.append(
            f"caught {counts['caught']} of {counts['planted']} planted bugs ({share:.1%}), "
            f"{counts['false_alarms']} false alarms in {counts['clean_runs']} clean runs "
            f"({counts['clean_comparisons']} comparisons), in {self.seconds:.0f} s"
        )
        return found


_ORDER = ("forward", "gradient", "fake", "lowering", "artifact")
_NAMED = 3
