"""Scaled dot-product attention."""

from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F

from fuseport.ops.vocabulary.case import Draw, PlainCase, PlainOperator, exact, normal, row

__all__ = ["CASES", "OPERATORS"]

OPERATORS = (
    PlainOperator(
        "scaled_dot_product_attention",
        F.scaled_dot_product_attention,
        about="(batch, heads, length, channels); a boolean mask says what takes part, a floating "
        "one is added to the scores, and has a gradient",
    ),
)


def _cases() -> Iterator[PlainCase]:
    def case(
        name: str, q: Draw, k: Draw, v: Draw, mask: Draw | None = None, **options: Any
    ) -> PlainCase:
        tensors = {"query": q, "key": k, "value": v}
        if mask is not None:
            tensors["attn_mask"] = mask
        layout = options.pop("layout", "contiguous")
        shared = options.pop("shared", {})
        operator = "scaled_dot_product_attention"
        return PlainCase(name, operator, tensors, options, shared, layout=layout)

    def heads(length: int, channels: int = 4, count: int = 3) -> Draw:
        return normal(2, count, length, channels)

    plain = heads(5), heads(6), heads(6)
    square = heads(5), heads(5), heads(5)
    yield case("plain", *plain)
    yield case("values of another size", heads(5), heads(6), heads(6, 3))
    yield case("causal", *square, is_causal=True)
    yield case("causal, fewer queries", *plain, is_causal=True)
    yield case("another scale", *plain, scale=0.2)
    allowed = exact(
        [[i == 0 or (7 * i + 3 * j) % 4 < 2 for j in range(6)] for i in range(5)],
    )
    yield case("boolean mask", *plain, allowed)
    yield case("floating mask", *plain, normal(5, 6))
    yield case("floating mask for each head", *plain, normal(2, 3, 5, 6))
    yield case("floating mask, broadcast", *plain, normal(2, 1, 1, 6))
    yield case(
        "shared heads", heads(5, count=4), heads(6, count=2), heads(6, count=2), enable_gqa=True
    )
    yield case("three dimensions", normal(2, 5, 4), normal(2, 6, 4), normal(2, 6, 4))
    yield case("one query, one key", heads(1), heads(1), heads(1))
    yield case("transposed", *square, is_causal=True, layout="transposed")
    yield case("strides of 0", row(2, 3, 5, 4), *plain[1:], layout="expanded")
    yield PlainCase(
        "shared",
        "scaled_dot_product_attention",
        {"query": heads(4)},
        shared={"key": "query", "value": "query"},
    )


CASES = tuple(_cases())
