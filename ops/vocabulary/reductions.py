"""Sums and means, whole and by axis: the gradient broadcasts."""

from collections.abc import Iterator
from typing import Any

import torch

from fuseport.ops.vocabulary.case import Draw, PlainCase, PlainOperator, normal, row

__all__ = ["CASES", "OPERATORS"]

OPERATORS = (PlainOperator("sum", torch.sum), PlainOperator("mean", torch.mean))


def _reduced(operator: str) -> Iterator[PlainCase]:
    def case(name: str, one: Draw, layout: Any = "contiguous", **attributes: Any) -> PlainCase:
        return PlainCase(name, operator, {"input": one}, attributes, layout=layout)

    yield case("whole", normal(2, 3, 4))
    yield case("first axis", normal(3, 4), dim=0)
    yield case("last axis", normal(2, 3, 4), dim=-1)
    yield case("two axes", normal(2, 3, 4), dim=[0, 2])
    yield case("axis kept", normal(2, 3, 4), dim=1, keepdim=True)
    yield case("every axis kept", normal(2, 3), dim=[0, 1], keepdim=True)
    yield case("axis of size 1", normal(3, 1), dim=1)
    yield case("no dimensions", normal())
    yield case("whole, transposed", normal(3, 4, 2), "transposed")
    yield case("axis, transposed", normal(3, 4, 2), "transposed", dim=1)
    yield case("axis, sliced", normal(3, 5), "sliced", dim=1)
    yield case("axis, strides of 0", row(2, 3, 4), "expanded", dim=0)
    yield case("no elements left", normal(0, 3), dim=1)
    yield case("many, of mixed sign", normal(257, 33), dim=0)


CASES = (
    *_reduced("sum"),
    PlainCase("of nothing", "sum", {"input": normal(0, 3)}, {"dim": 0}, note="the sum is 0"),
    *_reduced("mean"),
)
