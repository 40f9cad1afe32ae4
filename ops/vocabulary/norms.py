"""Normalisation: over the batch or by its running statistics, over layers, groups, instances."""

from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fuseport.ops.vocabulary.case import Draw, PlainCase, PlainOperator, normal, positive, row

__all__ = ["CASES", "OPERATORS"]


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    eps: float = 1e-5,
) -> Tensor:
    if running_mean is not None and running_var is not None:
        running_mean, running_var = running_mean.detach(), running_var.detach()
    return F.batch_norm(input, running_mean, running_var, weight, bias, training, eps=eps)


OPERATORS = (
    PlainOperator(
        "batch_norm",
        _batch_norm,
        about="running statistics get no gradient; training: those of the batch, biased variance",
    ),
    PlainOperator("layer_norm", F.layer_norm),
    PlainOperator("group_norm", F.group_norm),
    PlainOperator("instance_norm", F.instance_norm, about="as a group for each channel"),
)


def _affine(x: Draw, *sizes: int) -> dict[str, Draw]:
    return {"input": x, "weight": normal(*sizes), "bias": normal(*sizes)}


def _batch() -> Iterator[PlainCase]:
    running = {"running_mean": normal(3), "running_var": positive(3)}

    def case(
        name: str, tensors: dict[str, Draw], layout: Any = "contiguous", **a: Any
    ) -> PlainCase:
        return PlainCase(name, "batch_norm", tensors, a, layout=layout)

    x = normal(4, 3, 5)
    yield case("running statistics", {**_affine(x, 3), **running})
    yield case("running statistics, no affine", {"input": x, **running})
    yield case("running statistics, images", {**_affine(normal(2, 3, 4, 5), 3), **running})
    yield case("running statistics, volumes", {**_affine(normal(2, 3, 2, 3, 4), 3), **running})
    yield case("running statistics, two dimensions", {**_affine(normal(4, 3), 3), **running})
    yield case("running statistics, transposed", {**_affine(x, 3), **running}, "transposed")
    yield case("running statistics, strides of 0", {**_affine(x, 3), **running}, "expanded")
    yield case("another eps", {**_affine(x, 3), **running}, eps=0.1)
    # Without running statistics: they would be written to, and a program has no state.
    none = {"training": True}
    yield case("statistics of the batch", _affine(x, 3), **none)
    yield case("statistics of the batch, no affine", {"input": x}, **none)
    yield case("statistics of the batch, images", _affine(normal(2, 3, 4, 5), 3), **none)
    yield case("statistics of the batch, transposed", _affine(x, 3), "transposed", **none)


def _layer() -> Iterator[PlainCase]:
    def case(
        name: str, tensors: dict[str, Draw], over: list[int], layout: Any = "contiguous", **a: Any
    ) -> PlainCase:
        return PlainCase(
            name, "layer_norm", tensors, {"normalized_shape": over, **a}, layout=layout
        )

    x = normal(2, 3, 6)
    yield case("plain", _affine(x, 6), [6])
    yield case("no affine", {"input": x}, [6])
    yield case("no bias", {"input": x, "weight": normal(6)}, [6])
    yield case("two dimensions", _affine(x, 3, 6), [3, 6])
    yield case("two dimensions, no affine", {"input": x}, [3, 6])
    yield case("one row", _affine(normal(6), 6), [6])
    yield case("size 1", _affine(normal(4, 1), 1), [1])
    yield case("another eps", _affine(x, 6), [6], eps=0.1)
    yield case("transposed", _affine(x, 6), [6], "transposed")
    yield case("sliced", _affine(x, 6), [6], "sliced")
    yield case("strides of 0", _affine(row(2, 3, 6), 6), [6], "expanded")
    yield case("no rows", _affine(normal(0, 6), 6), [6])


def _groups() -> Iterator[PlainCase]:
    def case(
        name: str, tensors: dict[str, Draw], groups: int, layout: Any = "contiguous", **a: Any
    ) -> PlainCase:
        return PlainCase(name, "group_norm", tensors, {"num_groups": groups, **a}, layout=layout)

    x = normal(2, 6, 5)
    yield case("plain", _affine(x, 6), 3)
    yield case("no affine", {"input": x}, 3)
    yield case("one group", _affine(x, 6), 1)
    yield case("a group for each channel", _affine(x, 6), 6)
    yield case("images", _affine(normal(2, 4, 3, 5), 4), 2)
    yield case("two dimensions", _affine(normal(3, 6), 6), 2)
    yield case("another eps", _affine(x, 6), 2, eps=0.1)
    yield case("transposed", _affine(x, 6), 3, "transposed")
    yield case("strides of 0", _affine(row(2, 6, 5), 6), 3, "expanded")


def _instances() -> Iterator[PlainCase]:
    def case(
        name: str, tensors: dict[str, Draw], layout: Any = "contiguous", **a: Any
    ) -> PlainCase:
        return PlainCase(name, "instance_norm", tensors, a, layout=layout)

    x = normal(2, 3, 7)
    yield case("plain", _affine(x, 3))
    yield case("no affine", {"input": x})
    yield case("images", _affine(normal(2, 3, 4, 5), 3))
    yield case("volumes", _affine(normal(2, 3, 2, 3, 4), 3))
    yield case("another eps", _affine(x, 3), eps=0.1)
    yield case("transposed", _affine(x, 3), "transposed")
    yield case("strides of 0", _affine(row(2, 3, 7), 3), "expanded")


CASES = (*_batch(), *_layer(), *_groups(), *_instances())
