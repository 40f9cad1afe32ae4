"""The fused loss: torch's own values and gradients under all options, and what targets may be."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.ops import OPS, register
from fuseport.ops.softmax_cross_entropy import softmax_cross_entropy


def both(logits: Tensor, targets: Tensor, **options: Any) -> list[tuple[Tensor, Tensor]]:
    """Loss and gradient, of ours and of torch's."""
    found = []
    for loss in (softmax_cross_entropy, F.cross_entropy):
        leaf = logits.detach().requires_grad_()
        y = loss(leaf, targets, **options)
        (gradient,) = torch.autograd.grad((y * torch.linspace(1, 2, y.numel())).sum(), leaf)
        found.append((y.detach(), gradient))
    return found


@pytest.mark.parametrize(
    ("reduction", "smoothing", "ignore_index"),
    list(product(("mean", "sum", "none"), (0.0, 0.1, 1.0), (-100, 3))),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_values_and_gradients_are_those_of_torch(
    reduction: str, smoothing: float, ignore_index: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    targets = torch.randint(37, (9,))
    targets[[2, 7]] = ignore_index
    options = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignore_index}
    ours, torchs = both((3 * torch.randn(9, 37)).to(dtype), targets, **options)
    # torch rounds a half type's log-softmax, and its gradient, on the way.
    within: dict[str, Any] = {"rtol": 3e-2, "atol": 3e-2} if dtype == torch.bfloat16 else {}
    for mine, theirs in zip(ours, torchs, strict=True):
        torch.testing.assert_close(mine, theirs, **within)  # dtype and shape too


def test_extremes_are_those_of_torch() -> None:
    logits = torch.tensor(
        [[1e4, -1e4, 0.0], [-torch.inf, 1.0, 2.0], [torch.nan, 0.0, 0.0], [-3e38, 3e38, 0.0]]
    )
    for smoothing in (0.0, 0.1):
        options = {"reduction": "none", "label_smoothing": smoothing}
        ours, torchs = both(logits, torch.tensor([1, 2, 0, 0]), **options)
        assert torch.equal(ours[0].isnan(), torchs[0].isnan())
        torch.testing.assert_close(ours, torchs, equal_nan=True)


def test_a_mean_over_ignored_rows_alone_is_nan_as_that_of_torch() -> None:
    targets = torch.full((2,), -100)
    ours, torchs = both(torch.randn(2, 5), targets)
    assert ours[0].isnan()
    assert torchs[0].isnan()
    assert both(torch.randn(2, 5), targets, reduction="sum")[0][0] == 0


@pytest.mark.parametrize("wrong", [-1, 5, -99, 2**40])
def test_a_target_that_is_no_class_is_named_by_kernel_and_reference(wrong: int) -> None:
    register("softmax_cross_entropy")
    spec = OPS["softmax_cross_entropy"]
    forward, backward = spec.operators
    logits, targets = torch.randn(3, 5), torch.tensor([0, wrong, 1])
    ones = torch.ones(3)
    text = f"targets must be in 0 to 4, or ignore_index = -100; got {wrong}"
    for run in (forward, forward.reference):
        with pytest.raises(ValueError, match=text):
            run(logits, targets, -100, 0.0)
    for run in (backward, backward.reference):
        with pytest.raises(ValueError, match=text):
            run(ones, logits, targets, ones, ones, -100, 0.0)


def test_options_that_do_not_fit_are_named() -> None:
    logits, targets = torch.randn(3, 5), torch.tensor([0, 4, 1])
    for options, text in (
        ({"reduction": "max"}, "reduction must be 'mean', 'sum' or 'none'; got 'max'"),
        ({"label_smoothing": 1.5}, "label_smoothing must be in 0 to 1; got 1.5"),
        ({"label_smoothing": float("nan")}, "label_smoothing must be in 0 to 1; got nan"),
    ):
        with pytest.raises(ValueError, match=text):
            softmax_cross_entropy(logits, targets, **options)


def test_no_softmax_is_kept() -> None:
    logits = torch.randn(4, 6).requires_grad_()
    kept: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        softmax_cross_entropy(logits, torch.tensor([0, 4, 1, 2]))
    large = {t.data_ptr() for t in kept if t.numel() >= logits.numel()}
    assert large == {logits.data_ptr()}
