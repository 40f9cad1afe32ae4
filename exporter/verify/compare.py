"""The gates: one tensor of a candidate against the truth. Pure functions over tensors."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fuseport.exporter.verify.truth import Errors, errors

__all__ = ["Judgement", "Tolerance", "Verdict", "judge"]

Verdict = Literal["pass", "fail", "unsupported", "error"]

# How many times the baseline's largest error a candidate's may be, and its root mean square error.
_MAX_OUTPUT = 2.0
_MAX_GRADIENT = 3.0
_RMS = 2.0
_RMS_HALF = 3.0
# Units in the last place of the tensor's largest value (of its root mean square value) on top: what
# rounding a result once more may cost when the baseline happens to be exact.
_FLOOR_ULPS = 4.0


@dataclass(frozen=True)
class Tolerance:
    """numpy's: |candidate - truth| ≤ atol + rtol·|truth|, element by element."""

    atol: float = 0.0
    rtol: float = 0.0


@dataclass(frozen=True)
class Judgement:
    """A verdict on one tensor, with the figures behind it.

    Attributes:
        verdict: `pass` or `fail`.
        reason: None for a pass.
        max_abs_error: the candidate's largest error; None where no error can be computed.
        rms_error: its root mean square error.
        baseline_error: the baseline's largest error.
        bound: what `max_abs_error` may be.
        rms_bound: what `rms_error` may be.
        would_pass_at: the absolute tolerance under which it would pass.
    """

    verdict: Verdict
    reason: str | None = None
    max_abs_error: float | None = None
    rms_error: float | None = None
    baseline_error: float | None = None
    bound: float | None = None
    rms_bound: float | None = None
    would_pass_at: float | None = None


def judge(
    name: str,
    candidate: Tensor | None,
    truth: Tensor | None,
    dtype: str,
    baseline: Errors,
    tolerance: Tolerance | None = None,
) -> Judgement:
    """Hold one tensor against the truth, gate after gate.

    Args:
        name: of the tensor; gradients begin with `grad/`.
        candidate: what a runtime gave; None where it says that there is no gradient.
        truth: in float64, or as it is where not floating; None where there is no gradient.
        dtype: that the candidate must have.
        baseline: errors of equally good computations.
        tolerance: the user's, instead of the rule.
    """
    if truth is None or candidate is None:
        return _connectivity(candidate, truth)
    if tuple(candidate.shape) != tuple(truth.shape):
        return _fail(f"shape {_shape(candidate)} where the model has {_shape(truth)}")
    got = str(candidate.dtype).removeprefix("torch.")
    if got != dtype:
        return _fail(f"dtype {got} where the model has {dtype}")
    if not truth.is_floating_point():
        wrong = int((candidate != truth).sum())
        return _fail(f"{wrong} of {truth.numel()} values differ") if wrong else Judgement("pass")
    for what, test in (("NaN", torch.isnan), ("+Inf", torch.isposinf), ("-Inf", torch.isneginf)):
        if not torch.equal(test(candidate), test(truth)):
            mine, theirs = int(test(candidate).sum()), int(test(truth).sum())
            return _fail(f"another pattern of {what}: {mine} of them where the truth has {theirs}")
    return _accuracy(name, candidate, truth, baseline, tolerance)


def _connectivity(candidate: Tensor | None, truth: Tensor | None) -> Judgement:
    if truth is None and candidate is None:
        return Judgement("pass")
    if truth is None:
        return _fail("a gradient where the model has none")
    return _fail("no gradient where the model has one")


def _accuracy(
    name: str, candidate: Tensor, truth: Tensor, baseline: Errors, tolerance: Tolerance | None
) -> Judgement:
    found = errors(candidate, truth)
    zero, true_zero = not bool(candidate.any()), not bool(truth.any())
    finite = truth[torch.isfinite(truth)]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    rms_scale = float(finite.square().mean().sqrt()) if finite.numel() else 0.0
    bound, rms_bound = _bounds(name, candidate.dtype, baseline, scale, rms_scale)
    reason = None
    if zero and not true_zero:
        reason = "exactly zero where the model's is not"
    elif true_zero and not zero and baseline.max_abs == 0.0:
        reason = "not zero where the model's is exactly zero"
    elif tolerance is not None:
        allowed = tolerance.atol + tolerance.rtol * truth.abs()
        excess = torch.where(candidate == truth, 0.0, (candidate.double() - truth).abs()) - allowed
        bound, rms_bound = tolerance.atol + tolerance.rtol * scale, math.inf
        # Written so that NaN fails.
        if truth.numel() and not float(excess.max()) <= 0.0:
            reason = f"off by {found.max_abs:.3g}, beyond the tolerance given"
    elif not found.max_abs <= bound:
        reason = f"off by {found.max_abs:.3g}, where {bound:.3g} is allowed"
    elif not found.rms <= rms_bound:
        reason = f"off by {found.rms:.3g} on average, where {rms_bound:.3g} is allowed"
    return Judgement(
        "pass" if reason is None else "fail",
        reason,
        found.max_abs,
        found.rms,
        baseline.max_abs,
        bound,
        rms_bound,
        found.max_abs,
    )


def _bounds(
    name: str, dtype: torch.dtype, baseline: Errors, scale: float, rms_scale: float
) -> tuple[float, float]:
    ulp = torch.finfo(dtype).eps
    factor = _MAX_GRADIENT if name.startswith("grad/") else _MAX_OUTPUT
    rms_factor = _RMS_HALF if dtype.itemsize < 4 else _RMS
    bound = factor * baseline.max_abs + _FLOOR_ULPS * ulp * scale
    return bound, rms_factor * baseline.rms + _FLOOR_ULPS * ulp * rms_scale


def _fail(reason: str) -> Judgement:
    return Judgement("fail", reason)


def _shape(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "()"
