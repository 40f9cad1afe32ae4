"""Operators that read and write at indices: where an index repeats, gradients add up."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from fuseport.ops.vocabulary.case import (
    Draw,
    PlainCase,
    PlainOperator,
    exact,
    indices,
    normal,
    permuted,
    row,
)

__all__ = ["CASES", "OPERATORS"]

OPERATORS = (
    PlainOperator("gather", torch.gather),
    PlainOperator(
        "scatter", torch.scatter, about="no index is twice in a column: which one wins is undefined"
    ),
    PlainOperator("scatter_add", torch.scatter_add),
    PlainOperator("embedding", F.embedding),
)


def _gathered() -> Iterator[PlainCase]:
    def case(name: str, dim: int, one: Draw, index: Draw, **options: Any) -> PlainCase:
        return PlainCase(name, "gather", {"input": one, "index": index}, {"dim": dim}, **options)

    yield case("first dimension", 0, normal(3, 4), indices(5, 4, high=3))
    yield case("last dimension", -1, normal(2, 3, 4), indices(2, 3, 6, high=4))
    yield case("fewer columns", 0, normal(3, 4), indices(2, 2, high=3))
    yield case("an index many times", 0, normal(3), exact([1, 1, 1, 0, 1]))
    yield case("transposed", 1, normal(3, 4), indices(3, 2, high=4), layout="transposed")
    yield case("strides of 0", 1, row(3, 4), indices(3, 2, high=4), layout="expanded")
    yield case("no index", 0, normal(3, 4), indices(0, 4, high=3))


def _scattered(operator: str, index: Any) -> Iterator[PlainCase]:
    def case(name: str, dim: int, one: Draw, at: Draw, src: Draw, **options: Any) -> PlainCase:
        tensors = {"input": one, "index": at, "src": src}
        return PlainCase(name, operator, tensors, {"dim": dim}, **options)

    yield case("first dimension", 0, normal(5, 3), index(4, 3, high=5), normal(4, 3))
    yield case("last dimension", -1, normal(3, 5), exact([[4, 0], [1, 3], [2, 1]]), normal(3, 2))
    transposed = {"layout": "transposed"}
    yield case("transposed", 0, normal(5, 3), index(4, 3, high=5), normal(4, 3), **transposed)
    expanded = {"layout": "expanded"}
    yield case("strides of 0", 0, row(5, 3), index(4, 3, high=5), row(4, 3), **expanded)
    yield case("no index", 0, normal(5, 3), index(0, 3, high=5), normal(0, 3))


def _embedded() -> Iterator[PlainCase]:
    def case(name: str, rows: int, index: Draw, **options: Any) -> PlainCase:
        layout = options.pop("layout", "contiguous")
        tensors = {"input": index, "weight": normal(rows, 3)}
        return PlainCase(name, "embedding", tensors, options, layout=layout)

    yield case("plain", 7, indices(2, 5, high=7))
    yield case("an index many times", 4, exact([2, 2, 0, 2, 2]))
    yield case("one index", 4, exact(3))
    yield case("a row for padding", 4, exact([[1, 0, 1], [3, 1, 2]]), padding_idx=1)
    yield case("transposed", 5, indices(3, 4, high=5), layout="transposed")
    yield case("strides of 0", 5, indices(3, 4, high=5), layout="expanded")
    yield case("no index", 5, indices(0, 2, high=5))


CASES = (
    *_gathered(),
    *_scattered("scatter", permuted),
    PlainCase(
        "a number",
        "scatter",
        {"input": normal(4, 3), "index": permuted(2, 3, high=4)},
        {"dim": 0, "value": 1.5},
        note="the gradient is 0 where the number was written",
    ),
    *_scattered("scatter_add", indices),
    PlainCase(
        "all to one place",
        "scatter_add",
        {"input": normal(3), "index": exact([1, 1, 1, 1]), "src": normal(4)},
        {"dim": 0},
    ),
    *_embedded(),
)
