"""The gates: each lets what is right through, and fails what is wrong.

Fault 15; test_faults has it in a whole verification.
"""

import math

import pytest
import torch
from torch import Tensor

from fuseport.exporter.verify.compare import Expected, Judgement, Tolerance, judge
from fuseport.exporter.verify.measure import Norms, errors, norms

WORKING = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SCALES = [1e-6, 1.0, 1e6]


def truth_of(*shape: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(shape, generator=generator, dtype=torch.float64)


def expected_of(truth: Tensor, dtype: torch.dtype, *, ulps: float = 4.0) -> Expected:
    """A baseline that is some ulps of the tensor's scale off, as a layer or two is."""
    name = str(dtype).removeprefix("torch.")
    if not truth.is_floating_point():
        return Expected(name, norms(truth), Norms(0.0, 0.0))
    size = norms(truth)
    eps = torch.finfo(dtype).eps
    return Expected(name, size, Norms(ulps * eps * size.max_abs, ulps * eps * size.rms / 2))


def verdict(candidate: Tensor | None, truth: Tensor | None, name: str = "y") -> Judgement:
    if candidate is None or truth is None:
        return judge(name, candidate, truth, None)
    return judge(name, candidate, truth, expected_of(truth, candidate.dtype))


@pytest.mark.parametrize("dtype", WORKING, ids=str)
@pytest.mark.parametrize("name", ["y", "grad/w"])
def test_a_rounded_truth_passes_with_its_figures(dtype: torch.dtype, name: str) -> None:
    truth = truth_of(3, 5)
    found = verdict(truth.to(dtype), truth, name)
    assert found.verdict == "pass"
    assert found.reason is None
    assert found.max_abs_error is not None
    assert found.bound is not None
    assert found.max_abs_error <= found.bound
    assert found.would_pass_at == found.max_abs_error


@pytest.mark.parametrize("shape", [(15,), (5, 3), (1, 3, 5), (3, 1), ()])
def test_another_shape_fails_even_where_it_broadcasts(shape: tuple[int, ...]) -> None:
    truth = torch.ones(3, 5, dtype=torch.float64)
    found = verdict(torch.ones(shape), truth)
    assert found.verdict == "fail"
    assert "shape" in str(found.reason)


@pytest.mark.parametrize("dtype", [d for d in WORKING if d != torch.float32] + [torch.int64])
def test_another_dtype_fails_even_with_equal_values(dtype: torch.dtype) -> None:
    truth = torch.ones(3, dtype=torch.float64)
    found = judge("y", truth.to(dtype), truth, expected_of(truth, torch.float32))
    assert found.verdict == "fail"
    assert "dtype" in str(found.reason)


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
class TestNonFinite:
    def test_the_same_pattern_passes(self, special: float) -> None:
        truth = truth_of(8)
        truth[3] = special
        assert verdict(truth.float(), truth).verdict == "pass"

    def test_where_the_truth_is_finite_fails(self, special: float) -> None:
        truth = truth_of(8)
        candidate = truth.float()
        candidate[3] = special
        found = verdict(candidate, truth)
        assert found.verdict == "fail"
        assert "pattern" in str(found.reason)

    def test_a_number_in_its_place_fails(self, special: float) -> None:
        truth = truth_of(8)
        candidate = truth.float()
        truth[3] = special
        assert verdict(candidate, truth).verdict == "fail"

    def test_in_another_place_fails(self, special: float) -> None:
        truth = truth_of(8)
        truth[3] = special
        candidate = truth.roll(1).float()
        assert verdict(candidate, truth).verdict == "fail"

    def test_does_not_hide_an_error_elsewhere(self, special: float) -> None:
        truth = truth_of(8)
        truth[3] = special
        candidate = truth.float()
        candidate[5] *= 1.01
        # The baseline has it too, in the same place: that is no error of the baseline.
        baseline = errors(truth.float(), truth)
        assert math.isfinite(baseline.max_abs)
        expected = Expected("float32", norms(truth), baseline)
        assert judge("y", candidate, truth, expected).verdict == "fail"
        assert judge("y", truth.float(), truth, expected).verdict == "pass"

    def test_fails_under_any_tolerance(self, special: float) -> None:
        truth = truth_of(8)
        candidate = truth.float()
        candidate[3] = special
        expected = expected_of(truth, torch.float32)
        found = judge("y", candidate, truth, expected, Tolerance(1e30, 1e30))
        assert found.verdict == "fail"


def test_infinities_of_opposite_sign_fail() -> None:
    truth = truth_of(4)
    truth[1] = math.inf
    candidate = truth.float()
    candidate[1] = -math.inf
    assert verdict(candidate, truth).verdict == "fail"


def test_a_model_that_overflows_by_itself_is_unsupported_never_a_pass() -> None:
    truth = torch.full((4,), 1e6, dtype=torch.float64)
    overflown = truth.half()
    expected = Expected("float16", norms(truth), errors(overflown, truth))
    for candidate in (overflown, torch.zeros(4, dtype=torch.float16)):
        found = judge("y", candidate, truth, expected)
        assert found.verdict == "unsupported"
        assert "the model itself" in str(found.reason)


class TestConnectivity:
    def test_none_on_both_sides_passes(self) -> None:
        assert verdict(None, None, "grad/w").verdict == "pass"

    def test_none_where_the_model_has_a_gradient_fails(self) -> None:
        found = verdict(None, truth_of(3), "grad/w")
        assert (found.verdict, found.reason) == ("fail", "no gradient where the model has one")

    @pytest.mark.parametrize("value", [0.0, 1.0])
    def test_a_gradient_where_the_model_has_none_fails(self, value: float) -> None:
        assert verdict(torch.full((3,), value), None, "grad/w").verdict == "fail"

    @pytest.mark.parametrize("scale", [1e-30, *SCALES])
    def test_exactly_zero_where_the_model_is_not_fails(self, scale: float) -> None:
        truth = truth_of(3, scale=scale)
        found = verdict(torch.zeros(3), truth, "grad/w")
        assert (found.verdict, found.reason) == ("fail", "exactly zero where the model's is not")

    def test_exactly_zero_fails_under_any_tolerance(self) -> None:
        truth = truth_of(3)
        expected = expected_of(truth, torch.float32)
        assert judge("grad/w", torch.zeros(3), truth, expected, Tolerance(1e9)).verdict == "fail"

    def test_exactly_zero_passes_where_the_working_dtype_gives_zero(self) -> None:
        truth = truth_of(3, scale=1e-12)
        candidate = truth.half()
        assert not candidate.any()
        expected = Expected("float16", norms(truth), errors(candidate, truth), zero=True)
        assert judge("grad/w", candidate, truth, expected).verdict == "pass"

    def test_exactly_zero_passes_where_the_truth_is_rounding_alone(self) -> None:
        truth = truth_of(3, scale=1e-17)  # what float64 makes of a sum that cancels
        expected = Expected("float32", norms(truth), Norms(1e-8, 1e-8))
        assert judge("grad/b", torch.zeros(3), truth, expected).verdict == "pass"

    def test_in_float64_the_truth_itself_may_be_rounding_alone(self) -> None:
        truth = torch.tensor([3.4e-17], dtype=torch.float64)
        candidate = torch.zeros(1, dtype=torch.float64)
        rounded = Norms(3.0e-17, 3.0e-17)  # an equally good sum that cancels: 0.4e-17
        for scale, right in ((1.0, "pass"), (1e3, "fail"), (1e17, "fail")):
            expected = Expected("float64", norms(truth * scale), rounded)
            assert judge("grad/A", candidate, truth * scale, expected).verdict == right

    def test_not_zero_where_the_model_is_exactly_zero_fails(self) -> None:
        truth = torch.zeros(3, dtype=torch.float64)
        found = verdict(torch.tensor([0.0, 1e-30, 0.0]), truth, "grad/w")
        assert found.verdict == "fail"
        assert "exactly zero" in str(found.reason)

    def test_zero_on_both_sides_passes(self) -> None:
        truth = torch.zeros(3, dtype=torch.float64)
        assert verdict(-torch.zeros(3), truth, "grad/w").verdict == "pass"


class TestAccuracy:
    @pytest.mark.parametrize("scale", SCALES)
    @pytest.mark.parametrize("error", [0.01, 0.001])
    @pytest.mark.parametrize("name", ["y", "grad/w"])
    def test_an_error_in_one_channel_fails(self, scale: float, error: float, name: str) -> None:
        truth = truth_of(64, 33, scale=scale)
        candidate = truth.float()
        candidate[7] *= 1 + error
        assert verdict(candidate, truth, name).verdict == "fail"
        assert verdict(truth.float(), truth, name).verdict == "pass"

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("scale", [1e-2, 1.0, 1e3])
    def test_an_error_of_a_tenth_fails_in_half_types(
        self, dtype: torch.dtype, scale: float
    ) -> None:
        truth = truth_of(64, 33, scale=scale)
        candidate = truth.to(dtype)
        candidate[7] *= 1.1
        assert judge("y", candidate, truth, expected_of(truth, dtype, ulps=1)).verdict == "fail"

    @pytest.mark.parametrize("dtype", WORKING, ids=str)
    def test_a_wrong_sign_fails(self, dtype: torch.dtype) -> None:
        truth = truth_of(16)
        assert verdict(-truth.to(dtype), truth, "grad/w").verdict == "fail"

    def test_many_small_errors_fail_by_their_root_mean_square(self) -> None:
        truth = torch.ones(1000, dtype=torch.float64)
        truth[0] = 100.0
        expected = Expected("float32", norms(truth), Norms(1e-5, 1e-7))
        candidate = (truth + 1.9e-5).float()
        found = judge("y", candidate, truth, expected)
        assert found.verdict == "fail"
        assert "root mean square" in str(found.reason)

    def test_gradients_may_be_off_by_more_than_outputs(self) -> None:
        truth = torch.ones(100, dtype=torch.float64)
        expected = Expected("float32", norms(truth), Norms(1e-4, 1e-4))
        candidate = truth.float()
        candidate[0] += 2.5e-4
        assert judge("y", candidate, truth, expected).verdict == "fail"
        assert judge("grad/w", candidate, truth, expected).verdict == "pass"

    @pytest.mark.parametrize("count", [1, 2, 4, 9])
    def test_few_values_are_no_false_alarm(self, count: int) -> None:
        """Candidates of the baseline's own quality, which is known by four of its errors."""
        generator = torch.Generator().manual_seed(count)
        truth = torch.ones(count, dtype=torch.float64)
        for _ in range(3000):
            off = 1e-3 * torch.randn(5, count, generator=generator, dtype=torch.float64)
            known = Norms(off[1:].abs().max().item(), off[1:].square().mean(1).sqrt().max().item())
            candidate = (truth + off[0]).float()
            judged = judge("grad/w", candidate, truth, Expected("float32", norms(truth), known))
            assert judged.verdict == "pass", judged

    def test_a_single_value_may_not_be_off_by_anything(self) -> None:
        truth = torch.ones((), dtype=torch.float64)
        expected = Expected("float32", norms(truth), Norms(1e-5, 1e-5))
        for name, off in (("y", 1.2e-4), ("grad/w", 1.8e-4)):
            assert judge(name, (truth + off).float(), truth, expected).verdict == "fail"

    @pytest.mark.parametrize("scale", SCALES)
    def test_an_exact_baseline_leaves_a_few_ulps_of_the_tensor_itself(self, scale: float) -> None:
        truth = truth_of(50, scale=scale).float().double()
        expected = Expected("float32", norms(truth), Norms(0.0, 0.0))
        near = torch.nextafter(truth.float(), torch.tensor(math.inf))
        assert judge("y", near, truth, expected).verdict == "pass"
        assert judge("y", truth.float() * (1 + 1e-5), truth, expected).verdict == "fail"

    def test_beyond_one_part_of_a_large_tensor_fails(self) -> None:
        truth = truth_of(2**18 + 3)
        candidate = truth.float()
        candidate[-1] += 0.1
        assert verdict(candidate, truth).verdict == "fail"


class TestTolerance:
    def test_it_is_numpys(self) -> None:
        truth = torch.tensor([1.0, 100.0], dtype=torch.float64)
        expected = expected_of(truth, torch.float32)
        for candidate, tolerance, passes in [
            ([1.009, 100.0], Tolerance(0.01, 0.0), True),
            ([1.011, 100.0], Tolerance(0.01, 0.0), False),
            ([1.0, 100.9], Tolerance(0.0, 0.01), True),
            ([1.02, 100.0], Tolerance(0.0, 0.01), False),
            ([1.015, 101.0], Tolerance(0.01, 0.01), True),
        ]:
            found = judge("y", torch.tensor(candidate), truth, expected, tolerance)
            assert (found.verdict == "pass") is passes, (candidate, tolerance)

    def test_it_replaces_the_rule_in_both_directions(self) -> None:
        truth = truth_of(8)
        expected = expected_of(truth, torch.float32)
        off = (truth + 1e-3).float()
        assert judge("y", off, truth, expected).verdict == "fail"
        assert judge("y", off, truth, expected, Tolerance(2e-3)).verdict == "pass"
        assert judge("y", truth.float(), truth, expected, Tolerance(1e-12)).verdict == "fail"

    def test_what_would_pass_is_said_and_does(self) -> None:
        truth = truth_of(8)
        expected = expected_of(truth, torch.float32)
        off = (truth + 1e-3).float()
        at = judge("y", off, truth, expected).would_pass_at
        assert at is not None
        assert judge("y", off, truth, expected, Tolerance(at)).verdict == "pass"


class TestNotFloating:
    @pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.uint8])
    def test_equal_passes_and_one_other_value_fails(self, dtype: torch.dtype) -> None:
        truth = torch.tensor([1, 0, 1, 0]).to(dtype)
        assert verdict(truth.clone(), truth).verdict == "pass"
        wrong = truth.clone()
        wrong[2] = 0
        found = verdict(wrong, truth)
        assert (found.verdict, found.reason) == ("fail", "1 of 4 values differ")

    def test_what_rounding_decides_in_the_model_may_differ_as_much(self) -> None:
        truth = torch.arange(100)
        rounded = truth.clone()
        rounded[0] += 1
        expected = Expected("int64", norms(truth), errors(rounded, truth))
        other = truth.clone()
        other[50] += 1
        assert judge("token", other, truth, expected).verdict == "pass"
        assert judge("token", truth + 1, truth, expected).verdict == "fail"


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1, 1, 1)])
def test_empty_and_scalar_tensors_are_compared(shape: tuple[int, ...]) -> None:
    truth = truth_of(*shape)
    assert verdict(truth.float(), truth).verdict == "pass"
    assert verdict(truth.float()[None], truth).verdict == "fail"
    if truth.numel():
        assert verdict(truth.float() * 1.01, truth).verdict == "fail"
    integers = torch.zeros(shape, dtype=torch.int64)
    assert verdict(integers, integers).verdict == "pass"


def test_errors_of_a_non_contiguous_tensor_and_without_change_to_it() -> None:
    truth = truth_of(6, 4)
    candidate = truth.t().contiguous().t().float()
    before = truth.clone()
    assert errors(candidate, truth).max_abs < 1e-6
    assert norms(truth).max_abs == float(before.abs().max())
    assert torch.equal(truth, before)


@pytest.mark.parametrize("beside", [0.0, 1.0])
def test_nan_and_infinity_are_nothing_but_zero_where_they_are_the_models(beside: float) -> None:
    truth = torch.tensor([math.nan, math.inf, beside], dtype=torch.float64)
    assert verdict(truth.float(), truth).verdict == "pass"
    off = verdict(truth.float() + 0.5, truth)
    assert off.verdict == "fail"
    if beside == 0.0:
        assert "exactly zero" in str(off.reason)


def test_of_a_truth_without_a_finite_value_nothing_is_compared() -> None:
    truth = torch.full((3,), math.nan, dtype=torch.float64)
    found = verdict(truth.float(), truth)
    assert found.verdict == "unsupported"
    assert "nothing finite" in str(found.reason)
    assert verdict(torch.zeros(3), truth).verdict == "fail"
    assert verdict(torch.zeros(0), torch.zeros(0, dtype=torch.float64)).verdict == "pass"
