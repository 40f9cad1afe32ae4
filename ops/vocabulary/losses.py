"""Losses, in the forms that training code asks for: means, sums, weights, targets left out."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.ops.vocabulary.case import (
    Draw,
    PlainCase,
    PlainOperator,
    away,
    indices,
    normal,
    positive,
)

__all__ = ["CASES", "OPERATORS"]


def _cross_entropy(
    input: Tensor, target: Tensor, weight: Sequence[float] | None = None, **more: Any
) -> Tensor:
    return F.cross_entropy(input, target, _weights(weight, input), **more)


def _nll_loss(
    input: Tensor, target: Tensor, weight: Sequence[float] | None = None, **more: Any
) -> Tensor:
    return F.nll_loss(input, target, _weights(weight, input), **more)


def _of_logits(
    input: Tensor,
    target: Tensor,
    weight: Sequence[float] | None = None,
    pos_weight: Sequence[float] | None = None,
    **more: Any,
) -> Tensor:
    weights = _weights(weight, input)
    more["pos_weight"] = _weights(pos_weight, input)
    return F.binary_cross_entropy_with_logits(input, target, weights, **more)


def _weights(weight: Sequence[float] | None, input: Tensor) -> Tensor | None:
    return None if weight is None else torch.tensor(weight, dtype=input.dtype)


_MEAN = "a mean divides by the weights of the targets that are not left out"

OPERATORS = (
    PlainOperator("cross_entropy", _cross_entropy, about=_MEAN),
    PlainOperator("nll_loss", _nll_loss, about=_MEAN),
    PlainOperator("binary_cross_entropy", F.binary_cross_entropy),
    PlainOperator("binary_cross_entropy_with_logits", _of_logits),
    PlainOperator("kl_div", F.kl_div),
    PlainOperator("mse_loss", F.mse_loss),
    PlainOperator("smooth_l1_loss", F.smooth_l1_loss),
    PlainOperator("huber_loss", F.huber_loss),
)

_WEIGHTS = [0.5, 1.0, 2.0, 0.25]
_REDUCTIONS = ("mean", "sum", "none")


def _of_classes(operator: str) -> Iterator[PlainCase]:
    def case(name: str, one: Draw, other: Draw, layout: Any = "contiguous", **by: Any) -> PlainCase:
        return PlainCase(name, operator, {"input": one, "target": other}, by, layout=layout)

    rows, classes = normal(7, 4), indices(7, high=4)
    for reduction in _REDUCTIONS:
        yield case(reduction, rows, classes, reduction=reduction)
    yield case("weights", rows, classes, weight=_WEIGHTS)
    yield case("a class left out", rows, classes, ignore_index=2)
    yield case(
        "weights, a class left out", rows, classes, "sliced", weight=_WEIGHTS, ignore_index=1
    )
    yield case("one row", normal(1, 4), indices(1, high=4))
    yield case("maps", normal(2, 4, 3, 5), indices(2, 3, 5, high=4), weight=_WEIGHTS)
    if operator == "cross_entropy":
        for reduction in _REDUCTIONS:
            smooth = {"label_smoothing": 0.2, "reduction": reduction}
            yield case(f"smoothed, {reduction}", rows, classes, **smooth)
        smooth = {"label_smoothing": 0.1, "weight": _WEIGHTS, "ignore_index": 3}
        yield case("smoothed, weights, a class left out", rows, classes, **smooth)
        yield case("probabilities", rows, positive(7, 4))
        yield case("probabilities, weights", rows, positive(7, 4), weight=_WEIGHTS)


def _of_values(operator: str, one: Draw, other: Draw, **by: Any) -> Iterator[PlainCase]:
    tensors = {"input": one, "target": other}
    for reduction in _REDUCTIONS:
        yield PlainCase(reduction, operator, tensors, {**by, "reduction": reduction})
    yield PlainCase("transposed", operator, tensors, by, layout="transposed")


CASES = (
    *_of_classes("cross_entropy"),
    *_of_classes("nll_loss"),
    *_of_values("binary_cross_entropy", positive(3, 4, scale=0.3), positive(3, 4, scale=0.3)),
    *_of_values("binary_cross_entropy_with_logits", normal(3, 4), positive(3, 4, scale=0.3)),
    PlainCase("weights", "binary_cross_entropy_with_logits",
              {"input": normal(3, 4), "target": positive(3, 4, scale=0.3)},
              {"weight": _WEIGHTS, "pos_weight": _WEIGHTS[::-1]}),
    *_of_values("kl_div", normal(3, 4), positive(3, 4)),
    PlainCase("batchmean", "kl_div", {"input": normal(3, 4), "target": positive(3, 4)},
              {"reduction": "batchmean"}),
    PlainCase("logarithms", "kl_div", {"input": normal(3, 4), "target": normal(3, 4)},
              {"log_target": True, "reduction": "sum"}),
    *_of_values("mse_loss", normal(3, 4), normal(3, 4)),
    *_of_values("smooth_l1_loss", away(3, 4), normal(3, 4, scale=0.01), beta=0.4),
    *_of_values("huber_loss", away(3, 4), normal(3, 4, scale=0.01), delta=0.6),
)  # fmt: skip
