"""A saved report under other tolerances, without a run: what its figures decide."""

from dataclasses import replace
from itertools import pairwise

from fuseport.exporter.verify.diagnosis import Diagnosis
from fuseport.exporter.verify.report.model import FLOAT64, Report, Row
from fuseport.exporter.verify.tolerances import Tolerances

__all__ = ["needed", "rejudged"]

# How far lines through rounded figures may be off, relatively.
_ROUNDING = 1e-9


def rejudged(report: Report, tolerances: Tolerances) -> Report:
    """The report as it would be under these tolerances, in numpy's sense, as far as that is known.

    Rows of tensors that no pattern fits stay as they are; so do those that no tolerance changes:
    another shape or dtype, NaN, a missing or vanished gradient, whole numbers, and whatever could
    not be compared. A row is an `error` where its figures do not decide: verify again, then.

    Raises:
        UsageError: a pattern fits no tensor of the report.
    """
    tolerances.check({row.tensor for row in report.results})
    rows = tuple(_judged(row, tolerances) for row in report.results)
    failing = {_place(row) for row in rows if row.verdict == "fail"}
    note = f"judged again without a run, under {tolerances}"
    return replace(
        report,
        results=rows,
        notes=(*report.notes, note),
        diagnoses=tuple(d for d in report.diagnoses if _place(d) in failing),
    )


def needed(row: Row, rtol: float) -> tuple[float, float]:
    """Between which values the absolute tolerance lies that a row needs beside `rtol`.

    That is max(|error| - rtol·|truth|), or 0: a convex function of rtol that never rises, and whose
    slope is nowhere steeper than the truth's largest value. Known are its value at 0, the largest
    error, and of most rows its values at a few powers of ten, where both limits are the same.
    """
    assert row.max_abs_error is not None
    known = sorted((float(r), atol) for r, atol in (row.atol_at_rtol or {}).items())
    points = [(0.0, row.max_abs_error), *known]
    low, high = 0.0, row.max_abs_error
    for i, (at, value) in enumerate(points):
        if at == rtol:
            return value, value
        if at < rtol:
            high = value
            if row.scale is not None:
                low = max(low, value - row.scale * (rtol - at))
        else:
            low = max(low, value)
            if i and points[i - 1][0] < rtol:
                high = min(high, _line(points[i - 1], points[i], rtol))
    for one, other in pairwise(points):
        # Outside of two points, a convex function lies above the line through them.
        if not one[0] < rtol < other[0]:
            low = max(low, _line(one, other, rtol))
    return min(low, high) * (1 - _ROUNDING), high * (1 + _ROUNDING)


def _judged(row: Row, tolerances: Tolerances) -> Row:
    tolerance = tolerances.of(row.tensor)
    if tolerance is None or row.runtime == FLOAT64:  # truth, which has a rule of its own
        return row
    if row.max_abs_error is None or row.would_pass_at is None:
        return row
    low, high = needed(row, tolerance.rtol)
    before = f"{row.reason}; judged again: " if row.verdict == "fail" else ""
    bound = tolerance.atol + tolerance.rtol * (row.scale or 0.0)
    row = replace(row, bound=bound, rms_bound=None)
    if high <= tolerance.atol:
        return replace(row, verdict="pass", reason=None)
    off = f"off by {row.max_abs_error:.3g}"
    if not low > tolerance.atol:
        undecided = f"{off}: the report's figures do not decide: verify again with --rtol"
        return replace(row, verdict="error", reason=undecided)
    return replace(row, verdict="fail", reason=f"{before}{off}, beyond the tolerance given")


def _line(one: tuple[float, float], other: tuple[float, float], at: float) -> float:
    """Where the line through two points is at a third place."""
    slope = (other[1] - one[1]) / (other[0] - one[0])
    return one[1] + slope * (at - one[0])


def _place(of: Row | Diagnosis) -> tuple[str, str, str, str, str]:
    return of.runtime, of.artifact, of.program, of.way, of.case
