"""How small and how large integers can be, where they are no longer a linear function of places."""

from typing import Any

import torch

from fuseport.exporter.shims._sizes import always
from fuseport.exporter.shims._triton.places import Size, same

__all__ = ["UNKNOWN", "Bounds", "between"]

Bounds = tuple[Size | None, Size | None]
"""The smallest and the largest, None where that is not known."""

UNKNOWN: Bounds = (None, None)


def between(name: str, a: Bounds, b: Bounds) -> Bounds:
    """The bounds of what an operator gives.

    Args:
        name: of it.
        a, b: of its operands.
    """
    match name:
        case "add":
            return _both(a[0], b[0], _added), _both(a[1], b[1], _added)
        case "sub":
            return _both(a[0], b[1], _less), _both(a[1], b[0], _less)
        case "mul" | "floordiv" | "mod":
            return _by_number(name, a, b)
        case "minimum":
            return _both(a[0], b[0], _smaller), _either(a[1], b[1], _smaller)
        case "maximum":
            return _either(a[0], b[0], _larger), _both(a[1], b[1], _larger)
    return UNKNOWN


def _by_number(name: str, a: Bounds, b: Bounds) -> Bounds:
    """Of what is multiplied or divided by one positive number, which has what is not below 0."""
    if name == "mul" and not _is_one_number(b):
        a, b = b, a
    number: Any = b[0]
    if not _is_one_number(b) or not always(number > 0):
        return UNKNOWN
    if name == "mul":
        return _times(a[0], number), _times(a[1], number)
    if a[0] is None or not always(a[0] >= 0):
        return UNKNOWN
    if name == "mod":
        return 0, number - 1
    return a[0] // number, None if a[1] is None else a[1] // number


def _times(a: Size | None, number: Size) -> Size | None:
    return None if a is None else a * number


def _is_one_number(bounds: Bounds) -> bool:
    return bounds[0] is not None and bounds[1] is not None and same(*bounds)


def _both(a: Size | None, b: Size | None, of: Any) -> Size | None:
    return None if a is None or b is None else of(a, b)


def _either(a: Size | None, b: Size | None, of: Any) -> Size | None:
    """Where one is not known or dynamic, the other will do."""
    if a is None or b is None:
        return b if a is None else a
    if isinstance(a, int) != isinstance(b, int):
        return a if isinstance(a, int) else b
    return of(a, b)


def _added(a: Size, b: Size) -> Size:
    return a + b


def _less(a: Size, b: Size) -> Size:
    return a - b


def _smaller(a: Size, b: Size) -> Size:
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else torch.sym_min(a, b)


def _larger(a: Size, b: Size) -> Size:
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else torch.sym_max(a, b)
