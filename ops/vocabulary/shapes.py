"""Operators that move elements about: the gradient moves them back, and sums where one became
several."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.ops.vocabulary.case import Draw, PlainCase, PlainOperator, normal, row

__all__ = ["CASES", "OPERATORS"]


def _repeat(input: Tensor, repeats: Sequence[int]) -> Tensor:
    return input.repeat(*repeats)


def _cat(dim: int = 0, **tensors: Tensor) -> Tensor:
    return torch.cat(list(tensors.values()), dim)


def _upsample_nearest(
    input: Tensor, size: Any = None, scale_factor: Any = None, exact: bool = False
) -> Tensor:
    mode = "nearest-exact" if exact else "nearest"
    return F.interpolate(input, size, scale_factor, mode)


OPERATORS = (
    PlainOperator("transpose", torch.transpose),
    PlainOperator("reshape", torch.reshape),
    PlainOperator("flatten", torch.flatten),
    PlainOperator("squeeze", torch.squeeze),
    PlainOperator("unsqueeze", torch.unsqueeze),
    PlainOperator("cat", _cat, about="of the tensors, in the order of the arguments"),
    PlainOperator("select", torch.select),
    PlainOperator("narrow", torch.narrow),
    PlainOperator("pad", F.pad, about="pairs of widths, from the last dimension on"),
    PlainOperator("repeat", _repeat),
    PlainOperator("pixel_shuffle", F.pixel_shuffle),
    PlainOperator(
        "upsample_nearest",
        _upsample_nearest,
        about="element i comes from floor(i·in/out); from floor((i + 0.5)·in/out) if exact",
    ),
)


def _moves(
    operator: str,
    size: tuple[int, ...],
    others: Sequence[tuple[str, tuple[int, ...], Any]],
    /,
    **a: Any,
) -> Iterator[PlainCase]:
    """A plain case with attributes `a` in several layouts, and others with their own."""
    yield PlainCase("plain", operator, {"input": normal(*size)}, a)
    yield PlainCase("transposed", operator, {"input": normal(*size)}, a, layout="transposed")
    yield PlainCase("sliced", operator, {"input": normal(*size)}, a, layout="sliced")
    yield PlainCase("strides of 0", operator, {"input": row(*size)}, a, layout="expanded")
    for name, other, attributes in others:
        yield PlainCase(name, operator, {"input": normal(*other)}, attributes)


def _joined() -> Iterator[PlainCase]:
    def case(name: str, dim: int, *draws: Draw, **options: Any) -> PlainCase:
        tensors = dict(zip("abc", draws, strict=False))
        return PlainCase(name, "cat", tensors, {"dim": dim}, **options)

    yield case("first dimension", 0, normal(2, 3), normal(1, 3), normal(4, 3))
    yield case("last dimension", -1, normal(2, 3), normal(2, 1))
    yield case("middle dimension", 1, normal(2, 3, 4), normal(2, 2, 4))
    yield case("one tensor", 0, normal(2, 3))
    yield case("one of them empty", 1, normal(2, 3), normal(2, 0), normal(2, 1))
    yield case("transposed", 1, normal(3, 2), normal(3, 4), layout="transposed")
    yield case("strides of 0", 0, row(3, 2), row(2, 2), layout="expanded")
    yield case("shared", 1, normal(2, 3), shared={"b": "a"})


def _padded() -> Iterator[PlainCase]:
    def case(name: str, shape: tuple[int, ...], pad: list[int], **options: Any) -> PlainCase:
        layout = options.pop("layout", "contiguous")
        return PlainCase(
            name, "pad", {"input": normal(*shape)}, {"pad": pad, **options}, layout=layout
        )

    yield case("zeros", (2, 3, 4), [1, 2])
    yield case("zeros, two dimensions", (2, 3, 4), [1, 0, 2, 1])
    yield case("a constant", (2, 3), [2, 1], mode="constant", value=-1.5)
    yield case("cut off", (2, 5), [-1, 2])
    yield case("transposed", (3, 4, 2), [1, 1, 2, 0], layout="transposed")
    yield case("strides of 0", (3, 4), [1, 2], layout="expanded")
    for mode in ("reflect", "replicate", "circular"):
        yield case(f"{mode}, 1 dimension", (2, 3, 5), [2, 1], mode=mode)
        yield case(f"{mode}, 2 dimensions", (2, 3, 5, 4), [1, 2, 3, 0], mode=mode)
        yield case(f"{mode}, 3 dimensions", (1, 2, 3, 4, 5), [1, 2, 0, 3, 2, 1], mode=mode)
        yield case(f"{mode}, no batch", (3, 5), [0, 2], mode=mode)
        yield case(f"{mode}, transposed", (2, 3, 5), [1, 2], mode=mode, layout="transposed")
        yield case(f"{mode}, strides of 0", (2, 3, 5), [1, 2], mode=mode, layout="expanded")


CASES = (
    *_moves(
        "transpose",
        (2, 3, 4),
        [
            ("the same dimension", (2, 3), {"dim0": 1, "dim1": 1}),
            ("matrix", (3, 4), {"dim0": 0, "dim1": -1}),
            ("no elements", (0, 3), {"dim0": 0, "dim1": 1}),
        ],
        dim0=0,
        dim1=2,
    ),
    *_moves(
        "reshape",
        (2, 3, 4),
        [
            ("to no dimensions", (1, 1), {"shape": []}),
            ("one size to be found", (2, 3, 4), {"shape": [4, -1]}),
            ("no elements", (0, 4), {"shape": [2, 0]}),
        ],
        shape=[6, 4],
    ),
    *_moves(
        "flatten",
        (2, 3, 4),
        [
            ("from the second on", (2, 3, 4), {"start_dim": 1}),
            ("in the middle", (2, 3, 4, 2), {"start_dim": 1, "end_dim": 2}),
            ("no dimensions", (), {}),
        ],
    ),
    *_moves(
        "squeeze",
        (2, 1, 3, 1),
        [
            ("one dimension", (2, 1, 3, 1), {"dim": 1}),
            ("a dimension of another size", (2, 3), {"dim": 0}),
            ("two dimensions", (1, 3, 1), {"dim": [0, 2]}),
        ],
    ),
    *_moves(
        "unsqueeze",
        (2, 3),
        [("last", (2, 3), {"dim": -1}), ("no dimensions", (), {"dim": 0})],
        dim=1,
    ),
    *_joined(),
    *_moves(
        "select",
        (3, 4),
        [
            ("from the end", (2, 3, 4), {"dim": 1, "index": -1}),
            ("size 1", (1,), {"dim": 0, "index": 0}),
        ],
        dim=0,
        index=1,
    ),
    *_moves(
        "narrow",
        (4, 5),
        [
            ("from the end", (4, 5), {"dim": 0, "start": -2, "length": 2}),
            ("all", (4, 5), {"dim": 0, "start": 0, "length": 4}),
            ("nothing", (4, 5), {"dim": 0, "start": 1, "length": 0}),
        ],
        dim=1,
        start=1,
        length=3,
    ),
    *_padded(),
    *_moves(
        "repeat",
        (2, 3),
        [
            ("more dimensions", (2, 3), {"repeats": [2, 1, 3]}),
            ("once", (2, 3), {"repeats": [1, 1]}),
            ("never", (2, 3), {"repeats": [0, 1]}),
        ],
        repeats=[2, 3],
    ),
    *_moves(
        "pixel_shuffle",
        (2, 8, 3, 2),
        [
            ("by 3", (1, 9, 2, 2), {"upscale_factor": 3}),
            ("no batch", (4, 2, 3), {"upscale_factor": 2}),
        ],
        upscale_factor=2,
    ),
    *_moves(
        "upsample_nearest",
        (2, 3, 4, 5),
        [
            ("1 dimension", (2, 3, 4), {"scale_factor": 3.0}),
            ("3 dimensions", (1, 2, 2, 3, 2), {"scale_factor": 2.0}),
            ("a factor for each", (2, 3, 4, 5), {"scale_factor": [2.0, 3.0]}),
            ("to a size", (2, 3, 4, 5), {"size": [7, 12]}),
            ("to a smaller size", (2, 3, 4, 5), {"size": [3, 2]}),
            ("by a factor that is not whole", (2, 3, 4), {"scale_factor": 1.6}),
            ("exact, to a size", (2, 3, 4, 5), {"size": [7, 12], "exact": True}),
            ("exact, 1 dimension", (2, 3, 4), {"scale_factor": 2.0, "exact": True}),
        ],
        scale_factor=2.0,
    ),
)
