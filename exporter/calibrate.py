"""Tolerances proposed from runs that are known to be good: never from the run under test.

A run is good if every row of it passes by the rule of the baseline. The values are of other seeds
than any verification has, so what a proposal will judge had no part in it.
"""

import glob
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuseport.exporter import api
from fuseport.exporter.describe import environment
from fuseport.exporter.errors import UsageError
from fuseport.exporter.verify.report import FLOAT64, Report, Row
from fuseport.exporter.verify.run import Limits, quick_starts
from fuseport.exporter.verify.tolerances import Tolerances

__all__ = ["SCHEMA", "SEEDS", "Calibration", "Proposal", "calibrate", "proposed"]

SCHEMA = "fuseport.calibration/1"
SEEDS = 10_000
"""Where the seeds of calibrations begin; verifications have those from 0 on."""

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|(?<=_)\d+$")


@dataclass(frozen=True)
class Proposal:
    """A tolerance for the tensors of a pattern.

    Attributes:
        pattern: of their names: a number among them, that of a layer, is `*`.
        atol: proposed.
        largest_error: of the runs; and of equally good computations in the model's own dtype.
        tensor: that has it.
        comparisons: that it comes from.
    """

    pattern: str
    atol: float
    largest_error: float
    tensor: str
    comparisons: int


@dataclass(frozen=True)
class Calibration:
    """What calibration runs gave.

    Attributes:
        bundles: the folders.
        seeds: how many sets of values.
        margin: how many times the largest error is proposed.
        proposals: one for each pattern, longest first.
        held_out: how many comparisons were held against the proposal of the other seeds alone, and
            how many of them were beyond it.
        reports: of the runs, a report for each bundle.
        environment: versions and machine.
    """

    bundles: tuple[str, ...]
    seeds: int
    margin: float
    proposals: tuple[Proposal, ...]
    held_out: tuple[int, int]
    reports: tuple[Report, ...]
    environment: Mapping[str, Any]

    def exit_code(self) -> int:
        """That of the runs: where one is not good, there is no proposal."""
        codes = {report.exit_code() for report in self.reports}
        return next((code for code in (1, 6, 5) if code in codes), 0)

    def tolerances(self) -> Tolerances:
        """As `verify` takes them."""
        return Tolerances({proposal.pattern: proposal.atol for proposal in self.proposals})

    def to_toml(self) -> str:
        """A section of `fuseport.toml`."""
        compared = sum(p.comparisons for p in self.proposals)
        runtimes = sorted({row.runtime for r in self.reports for row in _compared(r.results)})
        held, beyond = self.held_out
        lines = [
            f"# fuseport calibrate {' '.join(self.bundles)}: {compared} comparisons,",
            f"# {self.seeds} seeds, in {', '.join(runtimes)}; {self.margin:g} × the largest error.",
            f"# Of {held} comparisons, {beyond} were beyond what the other seeds alone propose.",
            "[tolerances.tensors]",
        ]
        lines += [f"{json.dumps(p.pattern)} = {{ atol = {p.atol:g} }}" for p in self.proposals]
        return "\n".join(lines) + "\n"

    def to_json(self) -> str:
        """JSON, version 1."""
        held, beyond = self.held_out
        content = {
            "schema": SCHEMA,
            "bundles": list(self.bundles),
            "manifests_sha256": [report.manifest_sha256 for report in self.reports],
            "environment": dict(self.environment),
            "seeds": self.seeds,
            "margin": self.margin,
            "held_out": {"comparisons": held, "beyond": beyond},
            "proposals": [vars(proposal) for proposal in self.proposals],
        }
        return json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False)


def calibrate(
    bundles: Sequence[str | Path],
    *,
    runtime: Sequence[str] | None = None,
    model: str | None = None,
    ops: str | None = None,
    seeds: int = 5,
    margin: float = 2.0,
    limits: Limits | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Calibration:
    """Verify bundles by the rule, with values that no verification has, and propose tolerances.

    Args:
        bundles: their folders; a pattern that several have gets one tolerance.
        runtime: as of `api.verify`, like `model`, `ops` and `limits`.
        model: of the bundles.
        ops: of the bundles.
        seeds: how many sets of values, 2 at least.
        margin: how many times the largest error to propose, 1 at least.
        limits: of each runtime's process.
        progress: told of each step.

    Raises:
        UsageError: a number cannot be; and as of `api.verify`.
        FuseportError: as of `api.verify`.
    """
    if seeds < 2 or not 1.0 <= margin < math.inf:
        raise UsageError(f"{seeds} seeds, margin {margin:g}: 2 seeds, and a margin of 1, at least")
    numbers = range(SEEDS, SEEDS + seeds)
    with quick_starts():
        reports = tuple(
            api.verify(
                bundle,
                runtime=runtime,
                model=model,
                ops=ops,
                seeds=numbers,
                limits=limits,
                progress=progress,
            )
            for bundle in bundles
        )
    rows = [row for report in reports for row in _compared(report.results)]
    good = all(report.exit_code() == 0 for report in reports)
    return Calibration(
        tuple(map(str, bundles)),
        seeds,
        margin,
        proposed(rows, margin) if good else (),
        _held_out(rows, numbers, margin) if good else (0, 0),
        reports,
        environment(),
    )


def proposed(rows: Iterable[Row], margin: float) -> tuple[Proposal, ...]:
    """A proposal for each pattern of tensors' names.

    Args:
        rows: of good runs.
        margin: how many times the largest error; what is proposed is rounded up to one digit.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(_pattern(row.tensor), []).append(row)
    found = []
    for pattern, own in groups.items():
        worst = max(own, key=_error)
        atol = _rounded_up(margin * _error(worst))
        found.append(Proposal(pattern, atol, _error(worst), worst.tensor, len(own)))
    return tuple(sorted(found, key=lambda p: (-len(p.pattern), p.pattern)))


def _held_out(rows: Sequence[Row], seeds: Iterable[int], margin: float) -> tuple[int, int]:
    """Each seed's comparisons against what the others propose: how many, and how many beyond."""
    beyond = 0
    for seed in seeds:
        ending = f", seed {seed}"
        own = [row for row in rows if row.case.endswith(ending)]
        others = (row for row in rows if not row.case.endswith(ending))
        known = {p.pattern: p.atol for p in proposed(others, margin)}
        errors = ((known[_pattern(row.tensor)], row.max_abs_error or 0.0) for row in own)
        beyond += sum(not error <= atol for atol, error in errors)
    return len(rows), beyond


def _compared(rows: Iterable[Row]) -> list[Row]:
    """Those of a tensor with an error that a tolerance would judge."""
    own = (r for r in rows if r.runtime != FLOAT64 and not r.way.endswith("forms"))
    return [row for row in own if row.max_abs_error is not None]


def _error(row: Row) -> float:
    """The candidate's, or that of equally good computations where it happens to be smaller."""
    return max(row.max_abs_error or 0.0, row.baseline_error or 0.0)


def _pattern(tensor: str) -> str:
    return _NUMBER.sub("*", glob.escape(tensor))


def _rounded_up(value: float) -> float:
    if value == 0.0:
        return 0.0
    digit = 10.0 ** math.floor(math.log10(value))
    return float(f"{math.ceil(value / digit * (1 - 1e-12)) * digit:.0e}")
