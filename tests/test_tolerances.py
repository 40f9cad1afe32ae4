"""Tolerances by tensor: how they are given, which counts, what a saved report decides of them."""

import random
from dataclasses import replace

import pytest
import torch

from fuseport.exporter.errors import UsageError
from fuseport.exporter.verify.compare import Expected, Tolerance, judge
from fuseport.exporter.verify.diagnosis import Diagnosis
from fuseport.exporter.verify.measure import Norms, norms
from fuseport.exporter.verify.rejudge import needed, rejudged
from fuseport.exporter.verify.report import FLOAT64, Report, Row
from fuseport.exporter.verify.tolerances import Tolerances, parsed


@pytest.mark.parametrize(
    ("given", "tensor", "atol"),
    [
        (["1e-5"], "y", 1e-5),
        (["1e-5", "out0:1e-4"], "out0", 1e-4),
        (["1e-5", "out0:1e-4"], "out1", 1e-5),
        (["out0:1e-4"], "out1", None),
        (["grad/*:1", "grad/*.bias:2"], "grad/a.bias", 2.0),
        (["grad/*.bias:2", "grad/*:1"], "grad/a.bias", 2.0),
        # The name itself is more specific than any pattern, whatever its length.
        (["grad/a.bia?:3", "*bias:2", "grad/a.bias:1"], "grad/a.bias", 1.0),
        # Of equals the last.
        (["a*:1", "*b:2"], "ab", 2.0),
        (["*b:2", "a*:1"], "ab", 1.0),
        # The number is what comes after the last colon.
        (["model:0/y:1e-3"], "model:0/y", 1e-3),
        (["0"], "y", 0.0),
        # Names are no patterns of themselves, but they name themselves.
        (["w[0]:5"], "w[0]", 5.0),
        (["Y:5"], "y", None),
    ],
)
def test_the_most_specific_tolerance_counts(
    given: list[str], tensor: str, atol: float | None
) -> None:
    tolerances = parsed(given, ())
    assert tolerances is not None
    assert tolerances.of(tensor) == (None if atol is None else Tolerance(atol))


def test_what_only_one_option_speaks_of_has_zero_of_the_other() -> None:
    tolerances = parsed(["a:1e-3"], ["b:1e-2"])
    assert tolerances is not None
    assert tolerances.of("a") == Tolerance(1e-3, 0.0)
    assert tolerances.of("b") == Tolerance(0.0, 1e-2)
    assert tolerances.of("c") is None
    assert parsed((), ()) is None


@pytest.mark.parametrize("text", ["x", "y:", ":1", "y:x", "-1", "y:-1", "nan", "inf", "y:inf", ""])
def test_what_is_no_tolerance_is_usage(text: str) -> None:
    with pytest.raises(UsageError, match="--rtol"):
        parsed((), [text])


def test_two_tolerances_of_one_pattern_are_usage() -> None:
    with pytest.raises(UsageError, match="already"):
        parsed(["y:1", "y:2"], ())


def test_a_pattern_that_fits_nothing_is_usage_and_the_nearest_names_are_told() -> None:
    tolerances = Tolerances(atol={"grad/weigth": 1.0})
    with pytest.raises(UsageError, match="grad/weight"):
        tolerances.check(["grad/weight", "y"])
    Tolerances(atol={"*": 1.0, "gra*": 1.0}).check(["grad/weight", "y"])


ATOLS = [0.0, 1e-9, 1e-7, 1e-6, 3e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1.0]
RTOLS = [0.0, 1e-7, 1e-6, 4e-6, 1e-5, 2e-4, 1e-3, 5e-3, 1e-2, 0.05, 0.1, 0.7]
POWERS = [0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1]


def judged_row(seed: int) -> tuple[Row, torch.Tensor, torch.Tensor, Expected]:
    """A row of a tensor whose errors are spread over decades, of its own and of its truth."""
    generator = torch.Generator().manual_seed(seed)
    scale = 10.0 ** torch.randint(-5, 2, (1,), generator=generator).item()
    spread = 10 ** (-6 * torch.rand(257, generator=generator, dtype=torch.float64))
    truth = scale * spread * torch.randn(257, generator=generator, dtype=torch.float64)
    relative = 10 ** (-1 - 6 * torch.rand(257, generator=generator, dtype=torch.float64))
    noise = 10.0 ** -torch.randint(4, 9, (1,), generator=generator).item()
    candidate = (truth * (1 + relative) + noise * scale * spread.flip(0)).float()
    expected = Expected("float32", norms(truth), Norms(1e-4 * scale, 1e-5 * scale))
    judgement = judge("y", candidate, truth, expected)
    row = Row("onnxruntime", None, "f.onnx", "forward", "run", "c", "y", **vars(judgement))
    return row, candidate, truth, expected


@pytest.mark.parametrize("verdict", ["pass", "fail"])
def test_of_many_elements_the_figures_beside_rtol_are_there_where_it_fails(verdict: str) -> None:
    truth = torch.ones(2**20 + 1, dtype=torch.float64)
    expected = Expected("float32", norms(truth), Norms(1e-7, 1e-7))
    candidate = truth.float() + (1e-3 if verdict == "fail" else 0.0)
    found = judge("y", candidate, truth, expected)
    assert found.verdict == verdict
    assert (found.atol_at_rtol is not None) == (verdict == "fail")


def report_of(*rows: Row) -> Report:
    return Report("b", "0" * 64, {}, 1.0, rows)


@pytest.mark.parametrize("seed", range(40))
def test_a_saved_report_never_contradicts_a_run(seed: int) -> None:
    row, candidate, truth, expected = judged_row(seed)
    undecided = 0
    for atol in ATOLS:
        for rtol in RTOLS:
            again = judge("y", candidate, truth, expected, Tolerance(atol, rtol)).verdict
            found = rejudged(report_of(row), Tolerances({"*": atol}, {"*": rtol})).results[0]
            if found.verdict == "error":
                undecided += 1
                assert "verify again" in str(found.reason)
                # Never where it is said to be decided.
                assert rtol not in POWERS
            else:
                assert found.verdict == again, (atol, rtol)
    assert undecided < len(ATOLS) * len(RTOLS) / 4


def test_limits_of_what_is_needed_hold() -> None:
    rng = random.Random(0)
    for seed in range(40):
        row, candidate, truth, _ = judged_row(seed)
        for _ in range(20):
            rtol = 10 ** rng.uniform(-8, 0)
            beyond = ((candidate.double() - truth).abs() - rtol * truth.abs()).max()
            low, high = needed(row, rtol)
            assert low <= max(0.0, float(beyond)) * (1 + 1e-12)
            assert high >= max(0.0, float(beyond)) * (1 - 1e-12)


def test_what_no_tolerance_changes_stays() -> None:
    row, *_ = judged_row(0)
    kept = [
        replace(row, runtime=FLOAT64, verdict="fail"),
        replace(row, verdict="fail", reason="shape", max_abs_error=None, would_pass_at=None),
        replace(row, verdict="fail", reason="exactly zero", would_pass_at=None),
        replace(row, verdict="unsupported", max_abs_error=None, would_pass_at=None),
        replace(row, tensor="z", verdict="fail"),
    ]
    found = rejudged(report_of(row, *kept), Tolerances({"y": 1e9}))
    assert found.results[1:] == tuple(kept)
    assert found.results[0].verdict == "pass"
    assert any("--atol y:1e+09" in note for note in found.notes)


def test_zero_and_identity_are_no_tolerance_s_matter() -> None:
    """The figure that `judge` names as enough is none where no tolerance is."""
    truth = torch.ones(3, dtype=torch.float64)
    expected = Expected("float32", norms(truth), Norms(1e-7, 1e-7))
    assert judge("grad/w", torch.zeros(3), truth, expected).would_pass_at is None


def test_an_older_report_without_the_figures_is_decided_by_atol_alone() -> None:
    row, *_ = judged_row(1)
    assert row.max_abs_error is not None
    old = report_of(replace(row, scale=None, atol_at_rtol=None))
    assert rejudged(old, Tolerances({"*": row.max_abs_error})).exit_code() == 0
    assert rejudged(old, Tolerances({"*": row.max_abs_error * 0.99})).exit_code() == 1
    below = Tolerances({"*": row.max_abs_error * 0.5}, {"*": 1e-3})
    assert rejudged(old, below).exit_code() == 6


def test_a_diagnosis_goes_with_its_failures() -> None:
    row, *_ = judged_row(2)
    failing = replace(row, verdict="fail", max_abs_error=1.0, would_pass_at=1.0)
    told = Diagnosis("onnxruntime", "f.onnx", "forward", "run", "c", "export", "because")
    report = replace(report_of(failing), diagnoses=(told,))
    assert rejudged(report, Tolerances({"*": 0.5})).diagnoses == (told,)
    assert rejudged(report, Tolerances({"*": 2.0})).diagnoses == ()


def test_judging_again_and_back_gives_the_same_verdicts() -> None:
    rows = [judged_row(seed)[0] for seed in range(10)]
    loose = rejudged(report_of(*rows), Tolerances({"*": 1e9}))
    assert loose.exit_code() == 0
    once = rejudged(report_of(*rows), Tolerances({"*": 1e-6}))
    twice = rejudged(loose, Tolerances({"*": 1e-6}))
    assert [row.verdict for row in once.results] == [row.verdict for row in twice.results]
