"""Arithmetic, element by element: broadcasting, shared inputs, memory layouts, and kinks."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fuseport.ops.vocabulary.case import (
    Draw,
    PlainCase,
    PlainOperator,
    away,
    exact,
    normal,
    positive,
    row,
)

__all__ = ["CASES", "OPERATORS"]


def _add(input: Tensor, other: Any, alpha: float = 1.0) -> Tensor:
    return torch.add(input, other, alpha=alpha)


def _sub(input: Tensor, other: Any, alpha: float = 1.0) -> Tensor:
    return torch.sub(input, other, alpha=alpha)


def _mul(input: Tensor, other: Any) -> Tensor:
    return torch.mul(input, other)


def _div(input: Tensor, other: Any) -> Tensor:
    return torch.div(input, other)


def _pow(input: Any, exponent: Any) -> Tensor:
    return torch.pow(input, exponent)


def _clamp(input: Tensor, min: Any = None, max: Any = None) -> Tensor:
    return torch.clamp(input, min, max)


OPERATORS = (
    PlainOperator("add", _add, about="input + alpha·other"),
    PlainOperator("sub", _sub, about="input - alpha·other"),
    PlainOperator("mul", _mul),
    PlainOperator("div", _div),
    PlainOperator("neg", torch.neg),
    PlainOperator("pow", _pow, about="either argument may be a number"),
    PlainOperator("abs", torch.abs),
    PlainOperator("clamp", _clamp, about="bounds are numbers, or tensors that broadcast"),
    PlainOperator("exp", torch.exp),
    PlainOperator("log", torch.log),
    PlainOperator("sqrt", torch.sqrt),
)


def _binary(operator: str, other: Any) -> Iterator[PlainCase]:
    def case(name: str, one: Draw, two: Draw, **options: Any) -> PlainCase:
        return PlainCase(name, operator, {"input": one, "other": two}, **options)

    yield case("plain", normal(2, 3, 4), other(2, 3, 4))
    yield case("broadcast from the right", normal(2, 3, 4), other(4))
    yield case("broadcast in the middle", normal(2, 3, 4), other(3, 1))
    yield case("both broadcast", normal(2, 1, 4), other(3, 1))
    yield case("broadcast over more dimensions", normal(4), other(2, 3, 4))
    yield case("with a tensor of no dimensions", normal(2, 3), other())
    yield case("transposed", normal(3, 4, 2), other(3, 4, 2), layout="transposed")
    yield case("sliced, broadcast", normal(2, 3, 5), other(3, 5), layout="sliced")
    yield case("strides of 0", row(2, 3, 4), other(2, 3, 4), layout="expanded")
    yield case("strides of 0, broadcast", row(2, 3, 4), other(3, 1), layout="expanded")
    yield case("one element", normal(1), other(1))
    yield case("no elements", normal(0, 3), other(3))
    shared = {"other": "input"}
    yield PlainCase("shared", operator, {"input": other(2, 3)}, shared=shared)
    yield PlainCase(
        "shared, transposed", operator, {"input": other(4, 3)}, shared=shared, layout="transposed"
    )
    yield PlainCase("with a number", operator, {"input": normal(2, 3)}, {"other": -2.5})


def _unary(operator: str, draw: Any) -> Iterator[PlainCase]:
    def case(name: str, one: Draw, **options: Any) -> PlainCase:
        return PlainCase(name, operator, {"input": one}, **options)

    yield case("plain", draw(2, 3, 4))
    yield case("transposed", draw(3, 5, 2), layout="transposed")
    yield case("sliced", draw(2, 7), layout="sliced")
    yield case("strides of 0", draw(3, 4), layout="expanded")
    yield case("no dimensions", draw())
    yield case("no elements", draw(0, 3))


def _powers() -> Iterator[PlainCase]:
    def case(name: str, one: Draw, exponent: float, **options: Any) -> PlainCase:
        return PlainCase(name, "pow", {"input": one}, {"exponent": exponent}, **options)

    yield case("square", normal(2, 3), 2.0)
    yield case("cube", normal(2, 3), 3.0, layout="transposed")
    yield case("to the power of 1", normal(2, 3), 1.0)
    yield case("to the power of 0", normal(2, 3), 0.0, note="the gradient is 0, not missing")
    yield case("inverse", positive(2, 3), -1.0)
    yield case("root", positive(2, 3), 0.5)
    yield case("square of 0", exact([[0.0, 1.0, -2.0]]), 2.0, note="the gradient at 0 is 0")
    tensors = {"input": positive(2, 3, 4), "exponent": normal(3, 1)}
    yield PlainCase("exponents, broadcast", "pow", tensors)
    tensors = {"input": positive(3, 4), "exponent": normal(3, 4)}
    yield PlainCase("exponents, transposed", "pow", tensors, layout="transposed")
    tensors = {"input": exact([0.0, 0.0, 2.0]), "exponent": exact([2.0, 3.0, 0.0])}
    note = "at base 0 the gradient of a positive exponent is 0, not 0·log 0 = NaN"
    yield PlainCase("base 0", "pow", tensors, note=note)
    yield PlainCase("of a number", "pow", {"exponent": normal(2, 3)}, {"input": 2.5})
    yield PlainCase("shared", "pow", {"input": positive(2, 3)}, shared={"exponent": "input"})


def _clamps() -> Iterator[PlainCase]:
    def case(name: str, one: Draw, note: str = "", **bounds: float) -> PlainCase:
        return PlainCase(name, "clamp", {"input": one}, bounds, note=note)

    yield case("below and above", normal(4, 5), min=-0.5, max=0.7)
    yield case("below only", normal(4, 5), min=-0.25)
    yield case("above only", normal(4, 5), max=0.25)
    at = exact([[0.0, -1.0, 1.0], [0.0, 2.0, -0.5]])
    passes = "at a bound the gradient passes"
    yield case("at the lower bound", at, passes, min=0.0)
    yield case("at the upper bound", at, passes, max=0.0)
    yield case("bounds crossed", normal(4), "the upper bound wins", min=1.5, max=0.5)
    tensors = {"input": normal(4, 5), "min": normal(5, scale=0.1), "max": positive(4, 1)}
    yield PlainCase("bounds as tensors, broadcast", "clamp", tensors)
    layouts = ("transposed", "sliced", "expanded")
    tensors = {"input": row(3, 4)}
    bounds = {"min": -0.3, "max": 0.6}
    yield from (PlainCase(w, "clamp", tensors, bounds, layout=w) for w in layouts)  # type: ignore[arg-type]


CASES = (
    *_binary("add", normal),
    PlainCase("alpha", "add", {"input": normal(2, 3), "other": normal(3)}, {"alpha": -0.5}),
    *_binary("sub", normal),
    PlainCase("alpha", "sub", {"input": normal(2, 3), "other": normal(3)}, {"alpha": 1.5}),
    *_binary("mul", normal),
    *_binary("div", positive),
    *_unary("neg", normal),
    *_powers(),
    *_unary("abs", away),
    PlainCase(
        "at 0",
        "abs",
        {"input": exact([0.0, -0.0, 1.0, -1.0])},
        note="the gradient at 0 is 0",
    ),
    *_clamps(),
    *_unary("exp", normal),
    *_unary("log", positive),
    *_unary("sqrt", positive),
    PlainCase(
        "at 0",
        "sqrt",
        {"input": exact([0.0, 4.0])},
        note="the gradient at 0 is infinite, of the cotangent's sign",
    ),
)
