"""Quotients of sizes, and what code rounds of them: `math.ceil(length / 2)`.

Integers divided are integers in every format, and conditions on sizes can be asserted of them; what
else is rounded, formats write out.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

__all__ = ["quotient_of", "whole_quotients"]


@contextmanager
def whole_quotients() -> Iterator[None]:
    """Round quotients of sizes, and numbers added to them, by a division of integers."""
    kind: Any = torch.SymFloat
    divide: Any = torch.SymInt.__truediv__
    multiply, multiplied = torch.SymInt.__mul__, torch.SymInt.__rmul__
    add, subtract = kind.__add__, kind.__sub__
    floor, ceil, nearest = kind.__floor__, kind.__ceil__, kind.__round__

    def divided(size: Any, by: Any) -> Any:
        return _remembered(divide(size, by), size, by)

    def part(product: Any, size: Any, by: Any) -> Any:
        # By 0.5 or 0.25 a product has no rounding, as a quotient by 2 or 4 has none.
        exact = type(by) is float and 0 < by < 1 and math.frexp(by)[0] == 0.5
        return _remembered(product, size, int(1 / by)) if exact else product

    def added(quotient: Any, number: Any) -> Any:
        return _moved(add(quotient, number), quotient, number)

    def subtracted(quotient: Any, number: Any) -> Any:
        return _moved(subtract(quotient, number), quotient, -number)

    def rounded_down(quotient: Any) -> Any:
        known = quotient_of(quotient)
        return floor(quotient) if known is None else known[0] // known[1]

    def rounded_up(quotient: Any) -> Any:
        known = quotient_of(quotient)
        return ceil(quotient) if known is None else -(-known[0] // known[1])

    def rounded(quotient: Any, digits: Any = None) -> Any:
        known = quotient_of(quotient)
        if known is None or digits is not None:
            return nearest(quotient, digits)
        over, by = known
        up, beyond = (2 * over + by) // (2 * by), (2 * over + by) % (2 * by)
        if by % 2:
            return up
        half = 1 - torch.sym_min(beyond, 1)  # between two numbers, of which the even one is taken
        return up - half * (up % 2)

    instead: dict[str, Any] = {
        "__add__": added,
        "__radd__": added,
        "__sub__": subtracted,
        "__floor__": rounded_down,
        "__ceil__": rounded_up,
        "__round__": rounded,
    }
    of_sizes: dict[str, Any] = {
        "__truediv__": divided,
        "__mul__": lambda size, by: part(multiply(size, by), size, by),
        "__rmul__": lambda size, by: part(multiplied(size, by), size, by),
    }
    with (
        mock.patch.multiple(torch.SymInt, **of_sizes),
        mock.patch.multiple(kind, **instead),
    ):
        yield


def quotient_of(number: Any) -> tuple[torch.SymInt, int] | None:
    """The size, and the positive number, whose quotient something is; None of others."""
    known: tuple[torch.SymInt, int] | None = getattr(number, "quotient_of", None)
    return known


def _moved(result: Any, quotient: Any, number: Any) -> Any:
    known = quotient_of(quotient)
    if known is None or type(number) is not int:
        return result
    over, by = known
    return _remembered(result, over + number * by, by)


def _remembered(result: Any, over: Any, by: Any) -> Any:
    if isinstance(result, torch.SymFloat) and type(by) is int and by > 0:
        result.quotient_of = over, by  # type: ignore[attr-defined]
    return result
