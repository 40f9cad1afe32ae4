"""The gates: one tensor of a candidate against the truth. Pure functions over tensors."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fuseport.exporter.verify.measure import (
    Norms,
    beyond,
    errors,
    is_finite_somewhere,
    is_zero,
    norms,
    parts,
)

__all__ = ["Expected", "Judgement", "Tolerance", "Verdict", "expecting", "judge", "share"]

Verdict = Literal["pass", "fail", "unsupported", "error"]

# How many times the baseline's largest error a candidate's may be, and its root mean square error.
# Calibrated on 40,000 comparisons of clean runs (fixtures and small models of linear, convolution,
# attention and norm layers × dtypes × runtimes × seeds): none took more than 0.8 of its bound.
_OUTPUT = 2.0
_GRADIENT = 3.0
_RMS_OUTPUT = 2.0
_RMS_OUTPUT_HALF = 3.0
_RMS_GRADIENT = 3.0
# In float64 errors are far below any bug; but code that computes in float32 within has a baseline
# of few independent roundings there, since float64's last places do not move them.
_FLOAT64 = 16.0
# The baseline of a tensor of few values is the largest of few errors, and small at times by luck:
# one candidate in a hundred of equal quality would be off by three times as much in a single value.
# For n values the factors are 1 + _FEW/n² times as large, which makes that one in 10⁵ (half-normal
# errors, four of them independent). tests/benchmarks/random_shapes.py found it: without this there
# was a false alarm in 10⁴ draws.
_FEW = 4.0
# The relative tolerances for which it is noted what absolute one would do beside them. That takes
# as long as the rest of the comparison, so of tensors of many elements only where they fail.
_RTOLS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
_MANY = 2**18
# Units in the last place of the tensor's largest value (of its root mean square value) on top: what
# rounding a result once more may cost when the baseline happens to be exact.
_FLOOR_ULPS = 4.0
_FLOOR_ULPS_HALF = 2.0
_FLOOR_ULPS_FLOAT64 = 64.0  # the truth, of the same dtype, is rounded as often


@dataclass(frozen=True)
class Expected:
    """What is known of an output or a gradient beside the truth itself.

    Attributes:
        dtype: that it must have, `float32` for example.
        scale: of the truth, over its finite values.
        baseline: errors of equally good computations in that dtype, the largest among them.
        zero: whether one of these computations gave exactly zero throughout.
    """

    dtype: str
    scale: Norms
    baseline: Norms
    zero: bool = False


@dataclass(frozen=True)
class Tolerance:
    """numpy's: |candidate - truth| ≤ atol + rtol·|truth|, element by element."""

    atol: float = 0.0
    rtol: float = 0.0


@dataclass(frozen=True)
class Judgement:
    """A verdict on one tensor, with the figures behind it.

    Attributes:
        verdict: `pass` or `fail`; `unsupported` where the model itself is not fit to compare with.
        reason: None for a pass.
        max_abs_error: the candidate's largest error; None where no error can be computed.
        rms_error: its root mean square error.
        baseline_error: the baseline's largest error.
        bound: what `max_abs_error` may be.
        rms_bound: what `rms_error` may be.
        would_pass_at: the absolute tolerance under which it would pass; None where none would do.
        scale: the truth's largest value, over its finite ones.
        atol_at_rtol: the same as `would_pass_at`, beside a relative tolerance, by it; None also
            for what passes and has many elements.
    """

    verdict: Verdict
    reason: str | None = None
    max_abs_error: float | None = None
    rms_error: float | None = None
    baseline_error: float | None = None
    bound: float | None = None
    rms_bound: float | None = None
    would_pass_at: float | None = None
    scale: float | None = None
    atol_at_rtol: Mapping[str, float] | None = None


def expecting(value: Tensor, truth: Tensor, known: Expected | None) -> Expected:
    """What is expected of a tensor after one more equally good computation gave `value`.

    Args:
        value: in the working dtype.
        truth: in float64.
        known: of the computations before; None for the first.
    """
    found, vanished = errors(value, truth), is_zero(value)
    if known is None:
        dtype = str(value.dtype).removeprefix("torch.")
        return Expected(dtype, norms(truth), found, vanished)
    before = known.baseline
    worst = Norms(max(found.max_abs, before.max_abs), max(found.rms, before.rms))
    return replace(known, baseline=worst, zero=known.zero or vanished)


def share(
    error: float | None, bound: float | None, rms_error: float | None, rms_bound: float | None
) -> float | None:
    """How much of its bounds an error takes: above 1 it fails. None where there is no error."""
    pairs = ((error, bound), (rms_error, rms_bound))
    shares = [math.inf if b == 0.0 else e / b for e, b in pairs if e and b is not None]
    return max(shares, default=None if error is None else 0.0)


def judge(
    name: str,
    candidate: Tensor | None,
    truth: Tensor | None,
    expected: Expected | None,
    tolerance: Tolerance | None = None,
) -> Judgement:
    """Hold one tensor against the truth, gate after gate.

    Args:
        name: of the tensor; gradients begin with `grad/`.
        candidate: what a runtime gave; None where it gave nothing of this name.
        truth: in float64, or as it is where not floating; None where the model has no gradient.
        expected: what else is known of it; None where `truth` is.
        tolerance: the user's, instead of the rule.
    """
    if candidate is None or truth is None or expected is None:
        return _connectivity(name, candidate, truth)
    if tuple(candidate.shape) != tuple(truth.shape):
        return _fail(f"shape {_shape(candidate)} where the model has {_shape(truth)}")
    dtype = str(candidate.dtype).removeprefix("torch.")
    if dtype != expected.dtype:
        return _fail(f"dtype {dtype} where the model has {expected.dtype}")
    if not math.isfinite(expected.baseline.max_abs):
        return Judgement(
            "unsupported", f"in {dtype} the model itself gives NaN or Inf where float64 does not"
        )
    if not truth.is_floating_point():
        return _counted(candidate, truth, expected)
    found = errors(candidate, truth)
    if not math.isfinite(found.max_abs):
        return _fail(_pattern(candidate, truth))
    if not is_finite_somewhere(truth):
        return Judgement(
            "unsupported", "the model itself gives nothing finite here, in float64 neither"
        )
    return _accuracy(name, candidate, truth, found, expected, tolerance)


def _connectivity(name: str, candidate: Tensor | None, truth: Tensor | None) -> Judgement:
    if truth is None and candidate is None:
        return Judgement("pass")
    what = "gradient" if name.startswith("grad/") else "output"
    if truth is None:
        return _fail(f"{what} where the model has none")
    return _fail(f"no {what} where the model has one")


def _pattern(candidate: Tensor, truth: Tensor) -> str:
    for what, test in (("NaN", torch.isnan), ("+Inf", torch.isposinf), ("-Inf", torch.isneginf)):
        if not torch.equal(test(candidate), test(truth)):
            mine, theirs = int(test(candidate).sum()), int(test(truth).sum())
            return f"another pattern of {what}: {mine} of them where the truth has {theirs}"
    return "off by more than float64 holds"


def _counted(candidate: Tensor, truth: Tensor, expected: Expected) -> Judgement:
    """Integers and booleans: equal, but where rounding alone decides them in the model itself."""
    found, known = errors(candidate, truth), expected.baseline
    bound, rms_bound = known.max_abs, _RMS_OUTPUT * known.rms
    wrong = int((candidate != truth).sum())
    within = found.max_abs <= bound and found.rms <= rms_bound
    return Judgement(
        "pass" if within else "fail",
        None if within else f"{wrong} of {truth.numel()} values differ",
        found.max_abs,
        found.rms,
        known.max_abs,
        bound,
        rms_bound,
    )


def _accuracy(
    name: str,
    candidate: Tensor,
    truth: Tensor,
    found: Norms,
    expected: Expected,
    tolerance: Tolerance | None,
) -> Judgement:
    scale, baseline = expected.scale, expected.baseline
    bound, rms_bound = _bounds(name, candidate, baseline, scale)
    # A truth in float64 is rounded as often itself: where it should be zero, it is of their size.
    lost = bound if candidate.dtype == torch.float64 else baseline.max_abs
    if tolerance is not None:
        bound, rms_bound = tolerance.atol + tolerance.rtol * scale.max_abs, math.inf
    zero = _zero(candidate, expected, lost)
    reason = zero or _inaccurate(candidate, truth, found, Norms(bound, rms_bound), tolerance)
    profile = None
    if zero is None and (reason is not None or truth.numel() <= _MANY):
        needed = beyond(candidate, truth, _RTOLS)
        profile = {f"{rtol:.0e}": atol for rtol, atol in zip(_RTOLS, needed, strict=True)}
    return Judgement(
        "pass" if reason is None else "fail",
        reason,
        found.max_abs,
        found.rms,
        baseline.max_abs,
        bound,
        rms_bound,
        found.max_abs if zero is None else None,
        scale.max_abs,
        profile,
    )


def _zero(candidate: Tensor, expected: Expected, lost: float) -> str | None:
    """What is wrong with zeros, which no tolerance pardons: they say that something is cut off.

    But not where the truth is no larger than `lost`, and may be rounding alone.
    """
    scale, baseline = expected.scale, expected.baseline
    vanished = is_zero(candidate)
    if vanished and scale.max_abs > lost and not expected.zero:
        return "exactly zero where the model's is not"
    if not vanished and scale.max_abs == 0.0 and baseline.max_abs == 0.0:
        return "not zero where the model's is exactly zero"
    return None


def _inaccurate(
    candidate: Tensor, truth: Tensor, found: Norms, bound: Norms, tolerance: Tolerance | None
) -> str | None:
    """Why the errors are too large; None if they are not. Written so that NaN fails."""
    if tolerance is not None:
        if _tolerated(candidate, truth, tolerance):
            return None
        return f"off by {found.max_abs:.3g}, beyond the tolerance given"
    if not found.max_abs <= bound.max_abs:
        return f"off by {found.max_abs:.3g} where {bound.max_abs:.3g} is allowed"
    if not found.rms <= bound.rms:
        return f"off by {found.rms:.3g} in root mean square where {bound.rms:.3g} is allowed"
    return None


def _bounds(name: str, candidate: Tensor, baseline: Norms, scale: Norms) -> tuple[float, float]:
    dtype = candidate.dtype
    is_half = dtype.itemsize < 4
    ulps = _FLOOR_ULPS_HALF if is_half else _FLOOR_ULPS
    if dtype == torch.float64:
        factor = rms_factor = _FLOAT64
        ulps = _FLOOR_ULPS_FLOAT64
    elif name.startswith("grad/"):
        factor, rms_factor = _GRADIENT, _RMS_GRADIENT
    else:
        factor, rms_factor = _OUTPUT, _RMS_OUTPUT_HALF if is_half else _RMS_OUTPUT
    few = 1 + _FEW / max(candidate.numel(), 1) ** 2
    floor = ulps * torch.finfo(dtype).eps
    return (
        few * factor * baseline.max_abs + floor * scale.max_abs,
        few * rms_factor * baseline.rms + floor * scale.rms,
    )


def _tolerated(candidate: Tensor, truth: Tensor, tolerance: Tolerance) -> bool:
    for part, exact in parts(candidate, truth):
        allowed = tolerance.atol + tolerance.rtol * exact.abs()
        difference = (part.double() - exact).abs().masked_fill(part == exact, 0.0)
        wrong = ~(difference <= allowed) & ~(part.isnan() & exact.isnan())
        if bool(wrong.any()):
            return False
    return True


def _fail(reason: str) -> Judgement:
    return Judgement("fail", reason)


def _shape(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "()"
