"""Pooling: windows that overlap, hang over the edge, or are of several sizes."""

from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F

from fuseport.ops.vocabulary.case import Draw, PlainCase, PlainOperator, apart, exact, normal, row

__all__ = ["CASES", "OPERATORS"]

_MAX = "where values tie, the first in memory order gets the whole gradient"
_WINDOWS = "window i of n over L elements is floor(i·L/n) to ceil((i + 1)·L/n)"

OPERATORS = (
    PlainOperator("max_pool1d", F.max_pool1d, about=_MAX),
    PlainOperator("max_pool2d", F.max_pool2d, about=_MAX),
    PlainOperator("max_pool3d", F.max_pool3d, about=_MAX),
    PlainOperator("avg_pool1d", F.avg_pool1d),
    PlainOperator("avg_pool2d", F.avg_pool2d),
    PlainOperator("avg_pool3d", F.avg_pool3d),
    PlainOperator("adaptive_avg_pool1d", F.adaptive_avg_pool1d, about=_WINDOWS),
    PlainOperator("adaptive_avg_pool2d", F.adaptive_avg_pool2d, about=_WINDOWS),
    PlainOperator("adaptive_avg_pool3d", F.adaptive_avg_pool3d, about=_WINDOWS),
    PlainOperator("adaptive_max_pool1d", F.adaptive_max_pool1d, about=f"{_WINDOWS}; {_MAX}"),
    PlainOperator("adaptive_max_pool2d", F.adaptive_max_pool2d, about=f"{_WINDOWS}; {_MAX}"),
    PlainOperator("adaptive_max_pool3d", F.adaptive_max_pool3d, about=f"{_WINDOWS}; {_MAX}"),
)

_SIZES = {1: (9,), 2: (6, 7), 3: (4, 5, 6)}


def _each(n: int, *values: int) -> list[int]:
    return [values[i % len(values)] for i in range(n)]


def _pooled(kind: str, n: int, draw: Any) -> Iterator[PlainCase]:
    sizes = (2, 3, *_SIZES[n])

    def case(name: str, one: Draw, layout: Any = "contiguous", **attributes: Any) -> PlainCase:
        return PlainCase(name, f"{kind}_pool{n}d", {"input": one}, attributes, layout=layout)

    yield case("plain", draw(*sizes), kernel_size=_each(n, 2))
    yield case("overlapping", draw(*sizes), kernel_size=_each(n, 3, 2), stride=_each(n, 1, 2))
    yield case("gaps", draw(*sizes), kernel_size=_each(n, 2), stride=_each(n, 3))
    padded = {"kernel_size": _each(n, 3), "stride": _each(n, 2), "padding": _each(n, 1)}
    yield case("padding", draw(*sizes), **padded)
    yield case("past the end", draw(*sizes), ceil_mode=True, **padded)
    hanging = {"kernel_size": _each(n, 2), "stride": _each(n, 2), "ceil_mode": True}
    yield case("past the end, no padding", draw(2, 3, *_each(n, 5)), **hanging)
    yield case("no batch", draw(3, *_SIZES[n]), kernel_size=_each(n, 2))
    yield case("the whole", draw(2, 3, *_each(n, 3)), kernel_size=_each(n, 3))
    yield case("transposed", draw(*sizes), "transposed", **padded)
    yield case("sliced", draw(*sizes), "sliced", kernel_size=_each(n, 2))
    yield case("strides of 0", draw(*sizes), "expanded", kernel_size=_each(n, 2))


def _maxima(n: int) -> Iterator[PlainCase]:
    yield from _pooled("max", n, apart)
    operator = f"max_pool{n}d"
    spread = {"kernel_size": _each(n, 2), "stride": _each(n, 1), "dilation": _each(n, 2)}
    yield PlainCase("dilation", operator, {"input": apart(2, 3, *_SIZES[n])}, spread)
    ties = [0.0, 0.0, -1.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    nested: Any = {1: [ties], 2: [[ties, ties[::-1]]], 3: [[[ties, ties[::-1]]] * 2]}[n]
    attributes = {"kernel_size": _each(n, 2)}
    if n == 3:
        nested = [[[ties, ties[::-1]], [ties[::-1], ties]]]
    yield PlainCase("ties", operator, {"input": exact([nested])}, attributes, note=_MAX)


def _means(n: int) -> Iterator[PlainCase]:
    yield from _pooled("avg", n, normal)
    x = {"input": normal(2, 3, *_SIZES[n])}
    padded = {"kernel_size": _each(n, 3), "stride": _each(n, 2), "padding": _each(n, 1)}
    inside = {**padded, "count_include_pad": False}
    yield PlainCase("padding not counted", f"avg_pool{n}d", x, inside)
    hanging = {**inside, "ceil_mode": True}
    yield PlainCase("padding not counted, past the end", f"avg_pool{n}d", x, hanging)
    if n > 1:
        yield PlainCase("another divisor", f"avg_pool{n}d", x, {**padded, "divisor_override": 5})


def _adaptive(kind: str, n: int, draw: Any) -> Iterator[PlainCase]:
    sizes = (2, 3, *_SIZES[n])

    def case(name: str, one: Draw, size: list[int], layout: Any = "contiguous") -> PlainCase:
        tensors, attributes = {"input": one}, {"output_size": size}
        return PlainCase(name, f"adaptive_{kind}_pool{n}d", tensors, attributes, layout=layout)

    yield case("to 1", draw(*sizes), _each(n, 1))
    yield case("even windows", draw(2, 3, *_each(n, 6, 4)), _each(n, 3, 2))
    yield case("uneven windows", draw(*sizes), _each(n, 4, 3))
    yield case("the same size", draw(*sizes), list(_SIZES[n]))
    yield case("larger than the input", draw(2, 3, *_each(n, 3)), _each(n, 5, 4))
    yield case("no batch", draw(3, *_SIZES[n]), _each(n, 2))
    yield case("uneven windows, transposed", draw(*sizes), _each(n, 4, 3), "transposed")
    strided = row(*sizes) if kind == "avg" else draw(*sizes)
    yield case("uneven windows, strides of 0", strided, _each(n, 4, 3), "expanded")


CASES = (
    *(case for n in (1, 2, 3) for case in _maxima(n)),
    *(case for n in (1, 2, 3) for case in _means(n)),
    *(case for n in (1, 2, 3) for case in _adaptive("avg", n, normal)),
    *(case for n in (1, 2, 3) for case in _adaptive("max", n, apart)),
)
