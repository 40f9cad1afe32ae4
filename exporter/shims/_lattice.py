"""Rows of coordinates without bounds: which are alike, and which lie beside which, in plain torch.

A row is (batch, x₀, …, x_{d-1}), integers of any sign. It is found by one number, in a sorted list:
as many numbers are needed as the box has places that holds all rows, so these must be fewer than
2^62. Memory goes with rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["batches", "distinct", "floored", "seen"]

_MOST = 2**62


def distinct(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The first row of each kind, by its place, in order, (m,), and the kind of each row, (n,).

    Raises:
        ValueError: the rows, (n, 1 + d), span too many places.
    """
    numbers = _box([rows], [0] * (rows.shape[1] - 1)).numbers(rows)
    known, order = numbers.sort(stable=True)
    first = order[torch.searchsorted(known, numbers)]
    is_first = first == torch.arange(rows.shape[0], device=rows.device)
    kinds = is_first.long().cumsum(0) - 1
    return is_first.nonzero().squeeze(1), kinds[first]


def seen(of: Tensor, to: Tensor, offsets: Sequence[Sequence[int]]) -> Tensor:
    """(m, K): which row of `of` lies at each of K offsets from rows `to`; n where there is none.

    Args:
        of: rows that differ, (n, 1 + d).
        to: (m, 1 + d).
        offsets: of d numbers each.

    Raises:
        ValueError: the rows span too many places.
    """
    reach = [max(abs(offset[dim]) for offset in offsets) for dim in range(len(offsets[0]))]
    box = _box([of, to], reach)
    known, order = box.numbers(of).sort(stable=True)
    steps = torch.tensor([[0, *offset] for offset in offsets], device=of.device)
    wanted = box.numbers(to)[:, None] + (steps * box.weights).sum(1)
    place = torch.searchsorted(known, wanted)
    known = torch.cat([known, known.new_full((1,), _MOST)])
    order = torch.cat([order, order.new_zeros((1,))])
    return torch.where(known[place] == wanted, order[place], of.shape[0])


def floored(rows: Tensor, stride: Sequence[int]) -> Tensor:
    """Rows (n, 1 + d) moved to the first place of their cell, int32.

    Those of floats are rounded down, their batch to the nearest.
    """
    batch, *columns = rows.unbind(1)
    if rows.is_floating_point():
        batch, columns = batch.round(), [x.floor() for x in columns]
    cells = [
        x.int() if step == 1 else torch.div(x.int(), step, rounding_mode="floor") * step
        for x, step in zip(columns, stride, strict=True)
    ]
    return torch.stack([batch.int(), *cells], 1)


def batches(column: Tensor) -> Tensor:
    """(b,): the numbers that a column has, each once, in order."""
    found = column.sort().values
    before = torch.cat([found[:1] - 1, found])[: found.shape[0]]
    return found[found != before]


@dataclass(frozen=True)
class _Box:
    """Where rows are: the least of each column, and what its steps count, (1 + d,) each, int64."""

    low: Tensor
    weights: Tensor

    def numbers(self, rows: Tensor) -> Tensor:
        """(n,): of rows (n, 1 + d)."""
        numbers: Tensor = ((rows.long() - self.low) * self.weights).sum(1)
        return numbers


def _box(rows: Sequence[Tensor], reach: Sequence[int]) -> _Box:
    """In which rows have numbers of their own, as has what is within reach of them."""
    every = torch.cat([row.long() for row in rows])
    # Where there is no row at all, any box will do.
    some = torch.cat([every, every.new_zeros((1, every.shape[1]))])[:1]
    every = torch.cat([every, some])
    low = every.amin(0)
    spans = every.amax(0) - low + 1 + 2 * torch.tensor([0, *reach], device=low.device)
    has_values = not isinstance(spans, FakeTensor) and not torch.compiler.is_exporting()
    if has_values and spans.double().prod() >= _MOST:
        raise ValueError(
            f"sparse tensors span {' x '.join(map(str, spans.tolist()))} places, batches first, "
            "which are more than the 2^62 that fuseport's stand-in can number"
        )
    weights = [torch.ones_like(spans[0])]
    for span in spans.unbind()[:0:-1]:
        weights.append(weights[-1] * span)
    return _Box(low, torch.stack(weights[::-1]))
