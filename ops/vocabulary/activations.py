"""Activations: where they saturate, where they have kinks, and softmax by axis."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from fuseport.ops.vocabulary.case import Draw, PlainCase, PlainOperator, away, exact, normal, row

__all__ = ["CASES", "OPERATORS"]

OPERATORS = (
    PlainOperator("relu", F.relu),
    PlainOperator("leaky_relu", F.leaky_relu),
    PlainOperator("prelu", F.prelu, about="one slope, or one for each channel: dimension 1"),
    PlainOperator("sigmoid", torch.sigmoid),
    PlainOperator("tanh", torch.tanh),
    PlainOperator("gelu", F.gelu, about="by erf, or by the tanh formula"),
    PlainOperator("silu", F.silu),
    PlainOperator("mish", F.mish),
    PlainOperator("softmax", torch.softmax),
    PlainOperator("log_softmax", torch.log_softmax),
)

_ZEROS = exact([[0.0, -1.5, 2.0], [1.0, 0.0, -0.5]])


def _smooth(operator: str, draw: Any = normal, **attributes: Any) -> Iterator[PlainCase]:
    mode = "".join(f", {value}" for value in attributes.values())

    def case(name: str, one: Draw, **options: Any) -> PlainCase:
        return PlainCase(name + mode, operator, {"input": one}, attributes, **options)

    yield case("plain", draw(2, 3, 4))
    yield case("transposed", draw(3, 5, 2), layout="transposed")
    yield case("sliced", draw(2, 7), layout="sliced")
    yield case("strides of 0", row(3, 4) if draw is normal else draw(3, 4), layout="expanded")
    yield case("no dimensions", draw())
    yield case("no elements", draw(2, 0))
    yield case("saturated", exact([[-100.0, -30.0, -9.0, -0.5], [0.5, 9.0, 30.0, 100.0]]))


def _slopes() -> Iterator[PlainCase]:
    def case(name: str, one: Draw, weight: Draw, **options: Any) -> PlainCase:
        return PlainCase(name, "prelu", {"input": one, "weight": weight}, **options)

    yield case("one slope", away(2, 3, 4), normal(1))
    yield case("a slope for each channel", away(2, 3, 4), normal(3))
    yield case("images", away(2, 3, 4, 5), normal(3))
    yield case("two dimensions", away(4, 3), normal(3))
    yield case("transposed", away(2, 3, 4), normal(3), layout="transposed")
    yield case("strides of 0", away(2, 3, 4), normal(3), layout="expanded")
    note = "at 0 the gradient of the input is the slope's, that of the slope 0"
    yield case("at 0", _ZEROS, exact([0.25, 0.5, 2.0]), note=note)
    yield case("no elements", normal(0, 3, 2), normal(3))


def _axes(operator: str) -> Iterator[PlainCase]:
    def case(name: str, one: Draw, dim: int, **options: Any) -> PlainCase:
        return PlainCase(name, operator, {"input": one}, {"dim": dim}, **options)

    yield case("last axis", normal(2, 3, 4), -1)
    yield case("first axis", normal(3, 4), 0)
    yield case("middle axis", normal(2, 5, 3), 1)
    yield case("axis of size 1", normal(3, 1), 1)
    yield case("transposed", normal(3, 4, 2), 1, layout="transposed")
    yield case("sliced", normal(3, 5), -1, layout="sliced")
    yield case("strides of 0", row(2, 3, 4), -1, layout="expanded")
    yield case("large values", normal(2, 6, scale=60.0), -1, note="the maximum is taken off first")
    masked = exact([[0.5, float("-inf"), 1.5], [float("-inf"), 2.0, float("-inf")]])
    if operator == "softmax":
        note = "a masked element has probability 0 and gradient 0"
        yield case("masked", masked, -1, note=note)
    yield case("no elements", normal(0, 3), -1)


CASES = (
    *_smooth("relu", away),
    PlainCase("at 0", "relu", {"input": _ZEROS}, note="the gradient at 0 is 0"),
    *_smooth("leaky_relu", away),
    PlainCase("another slope", "leaky_relu", {"input": away(2, 3)}, {"negative_slope": 0.2}),
    PlainCase(
        "at 0",
        "leaky_relu",
        {"input": _ZEROS},
        {"negative_slope": 0.125},
        note="the gradient at 0 is the slope",
    ),
    *_slopes(),
    *_smooth("sigmoid"),
    *_smooth("tanh"),
    *_smooth("gelu", approximate="none"),
    *_smooth("gelu", approximate="tanh"),
    *_smooth("silu"),
    *_smooth("mish"),
    *_axes("softmax"),
    *_axes("log_softmax"),
)
