"""Places of a triangle of a matrix, `torch.triu_indices(n, n, 1)`, where its size is no number."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true

from fuseport.exporter.program.instead._parts import unlike_the_usual

__all__ = ["TRIANGLES"]


def _places(
    upper: bool,
    row: Any,
    col: Any,
    offset: Any = 0,
    *,
    dtype: torch.dtype = torch.long,
    device: Any = None,
    **others: Any,
) -> Any:
    if not _is_symbolic(row, col, offset) or unlike_the_usual(others):
        return NotImplemented
    cut = offset if upper else -offset
    if not _is_triangle(row, col, offset, cut):
        beyond = torch.arange(col, device=device) - torch.arange(row, device=device)[:, None]
        places = beyond >= offset if upper else beyond <= offset
        return places.nonzero().mT.to(dtype)
    side = torch.sym_max(row - cut, 0)
    number = torch.arange(side * (side + 1) // 2, device=device)
    if not upper:
        at, place = _of_growing(number)
        return torch.stack([at + cut, place]).to(dtype)
    # From behind rows grow by one.
    back, place = _of_growing(side * (side + 1) // 2 - 1 - number)
    return torch.stack([side - 1 - back, side - 1 - place + cut]).to(dtype)


def _is_symbolic(*numbers: Any) -> bool:
    return any(isinstance(number, SymInt) for number in numbers)


def _is_triangle(row: Any, col: Any, offset: Any, cut: Any) -> bool:
    """Whether it is one of a square of inputs' size, `cut` less wide: how many places it has is
    known of that."""
    known = isinstance(offset, int) and cut >= 0 and not free_unbacked_symbols(row)
    return known and statically_known_true(row == col)


def _of_growing(number: Tensor) -> tuple[Tensor, Tensor]:
    """The row and the place in it of such numbers, of rows of 1, 2, 3, … places."""
    row = ((8 * number + 1).double().sqrt() - 1).div(2).floor().long()
    row = row - (row * (row + 1) // 2 > number).long()
    row = row + ((row + 1) * (row + 2) // 2 <= number).long()
    return row, number - row * (row + 1) // 2


TRIANGLES: Mapping[Any, Callable[..., Any]] = {
    torch.triu_indices: partial(_places, True),
    torch.tril_indices: partial(_places, False),
}
"""What computes the same; NotImplemented where all sizes are numbers."""
