"""Products and convolutions."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from fuseport.ops.vocabulary.case import Draw, PlainCase, PlainOperator, normal, row

__all__ = ["CASES", "OPERATORS"]

_DEPTHWISE = "groups = channels: one filter, or several, for each channel"

OPERATORS = (
    PlainOperator("matmul", torch.matmul, about="as numpy's: vectors, and batches that broadcast"),
    PlainOperator("conv1d", F.conv1d),
    PlainOperator("conv2d", F.conv2d),
    PlainOperator("conv3d", F.conv3d),
    PlainOperator("depthwise_conv1d", F.conv1d, about=_DEPTHWISE),
    PlainOperator("depthwise_conv2d", F.conv2d, about=_DEPTHWISE),
    PlainOperator("depthwise_conv3d", F.conv3d, about=_DEPTHWISE),
    PlainOperator("conv_transpose1d", F.conv_transpose1d),
    PlainOperator("conv_transpose2d", F.conv_transpose2d),
    PlainOperator("conv_transpose3d", F.conv_transpose3d),
    # Deformable convolution is an op of its own, `fuseport.ops.deform_conv2d`, with its own cases.
)


def _products() -> Iterator[PlainCase]:
    def case(name: str, one: Draw, two: Draw, **options: Any) -> PlainCase:
        return PlainCase(name, "matmul", {"input": one, "other": two}, **options)

    yield case("matrices", normal(3, 4), normal(4, 5))
    yield case("vectors", normal(4), normal(4))
    yield case("matrix and vector", normal(3, 4), normal(4))
    yield case("vector and matrix", normal(4), normal(4, 3))
    yield case("batches", normal(2, 3, 4), normal(2, 4, 5))
    yield case("batches broadcast", normal(2, 1, 3, 4), normal(5, 4, 2))
    yield case("batch and matrix", normal(2, 3, 4), normal(4, 5))
    yield case("matrix and batch", normal(3, 4), normal(2, 4, 5))
    yield case("batch and vector", normal(2, 3, 4), normal(4))
    yield case("transposed", normal(3, 4), normal(4, 5), layout="transposed")
    yield case("batches transposed", normal(2, 3, 4), normal(2, 4, 5), layout="transposed")
    yield case("sliced", normal(3, 4), normal(4, 5), layout="sliced")
    yield case("strides of 0", row(2, 3, 4), normal(4, 5), layout="expanded")
    yield case("sizes of 1", normal(1, 1), normal(1, 1))
    yield case("no rows", normal(0, 4), normal(4, 5), note="the other's gradient is 0")
    yield case("nothing to sum", normal(3, 0), normal(0, 2), note="the product is 0")
    shared = {"other": "input"}
    yield PlainCase("shared", "matmul", {"input": normal(3, 3)}, shared=shared)


# Sizes of a filter and of what it sees, by the number of dimensions.
_TAPS = {1: (3,), 2: (3, 2), 3: (2, 3, 2)}
_SIZES = {1: (9,), 2: (7, 6), 3: (5, 6, 4)}


def _each(n: int, *values: int) -> list[int]:
    return [values[i % len(values)] for i in range(n)]


def _convolutions(n: int) -> Iterator[PlainCase]:
    taps, sizes = _TAPS[n], _SIZES[n]

    def case(
        name: str, x: tuple[int, ...], w: tuple[int, ...], bias: bool = True, **options: Any
    ) -> PlainCase:
        tensors = {"input": normal(*x), "weight": normal(*w)}
        if bias:
            tensors["bias"] = normal(w[0])
        layout = options.pop("layout", "contiguous")
        return PlainCase(name, f"conv{n}d", tensors, options, layout=layout)

    x, w = (2, 3, *sizes), (4, 3, *taps)
    yield case("plain", x, w)
    yield case("no bias", x, w, bias=False)
    yield case("pointwise", x, (4, 3, *_each(n, 1)))
    yield case("stride", x, w, stride=_each(n, 2, 3))
    yield case("padding", x, w, padding=_each(n, 1, 2))
    yield case("dilation", x, w, dilation=_each(n, 2, 1))
    yield case("stride past the end", x, w, stride=_each(n, 4, 5), padding=_each(n, 1))
    yield case("same size", x, w, padding="same")
    yield case("groups", (2, 4, *sizes), (6, 2, *taps), groups=2)
    every: dict[str, Any] = {
        "stride": _each(n, 2),
        "padding": _each(n, 1),
        "dilation": _each(n, 1, 2),
    }
    yield case("everything", (2, 4, *sizes), (6, 2, *taps), groups=2, **every)
    yield case("a filter as large as the input", (2, 3, *taps), w)
    yield case("transposed", x, w, layout="transposed")
    yield case("strides of 0", x, w, layout="expanded", padding=_each(n, 1))
    yield case("batch of 0", (0, 3, *sizes), w)


def _depthwise(n: int) -> Iterator[PlainCase]:
    taps, sizes = _TAPS[n], _SIZES[n]

    def case(name: str, outputs: int, **options: Any) -> PlainCase:
        tensors = {"input": normal(2, 4, *sizes), "weight": normal(outputs, 1, *taps)}
        tensors["bias"] = normal(outputs)
        layout = options.pop("layout", "contiguous")
        attributes = {"groups": 4, **options}
        return PlainCase(name, f"depthwise_conv{n}d", tensors, attributes, layout=layout)

    yield case("plain", 4)
    yield case("two filters for each channel", 8)
    yield case("causal padding", 4, padding=[taps[0] - 1, *_each(n, 0)][:n])
    yield case("stride and dilation", 4, stride=_each(n, 2), dilation=_each(n, 2, 1))
    yield case("transposed", 4, padding=_each(n, 1), layout="transposed")
    yield case("strides of 0", 4, layout="expanded")


def _transposed(n: int) -> Iterator[PlainCase]:
    taps = _TAPS[n]
    sizes = {1: (5,), 2: (4, 3), 3: (3, 2, 3)}[n]

    def case(name: str, groups: int = 1, bias: bool = True, **options: Any) -> PlainCase:
        tensors = {"input": normal(2, 4, *sizes), "weight": normal(4, 6 // groups, *taps)}
        if bias:
            tensors["bias"] = normal(6)
        layout = options.pop("layout", "contiguous")
        attributes = {"groups": groups, **options}
        return PlainCase(name, f"conv_transpose{n}d", tensors, attributes, layout=layout)

    yield case("plain")
    yield case("no bias", bias=False)
    yield case("stride", stride=_each(n, 2, 3))
    yield case("padding", stride=_each(n, 2), padding=_each(n, 1))
    yield case("output padding", stride=_each(n, 2, 3), output_padding=_each(n, 1, 2))
    yield case("dilation", dilation=_each(n, 2, 1))
    yield case("groups", groups=2, stride=_each(n, 2))
    yield case("transposed", stride=_each(n, 2), layout="transposed")
    yield case("strides of 0", stride=_each(n, 2), layout="expanded")


CASES = (
    *_products(),
    *(case for n in (1, 2, 3) for case in _convolutions(n)),
    *(case for n in (1, 2, 3) for case in _depthwise(n)),
    *(case for n in (1, 2, 3) for case in _transposed(n)),
)
