"""Windows of neighbours along each dimension, as tiles of queries and what all of a tile see.

A tile is some queries in a row, `size` of them, of one dilation group. Their windows lie within
`seen` keys, so scores of a tile are one matrix product, and each query's own are among them. In the
shapes here, n is the number of dimensions, L… are their lengths, T… and S… sizes and keys of tiles,
k… kernel sizes, and N is the number of tiles of all dimensions: where lengths are dynamic, the
fewer dimensions are symbols, the faster a program is captured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "Axis",
    "Tiling",
    "contracted",
    "gathered",
    "hidden",
    "hidden_of_window",
    "places",
    "spread",
    "tiled",
    "untiled",
]


@dataclass(frozen=True)
class Axis:
    """How windows lie along one dimension.

    Attributes:
        kernel: how many keys a window has.
        stride: of how many queries in a row the windows are one.
        dilation: how far apart keys of a window are; queries that far apart are a group.
        causal: whether a query sees no key after it.
    """

    kernel: int
    stride: int
    dilation: int
    causal: bool


class _Row:
    """The tiles of one dimension.

    Attributes:
        size: queries in a tile.
        seen: keys of a tile.
        of_group: tiles of a dilation group.
        count: tiles of all groups.
        keys: (count·seen,), which keys each tile has, one tile after another.
        slots: (count, size, seen), at which place of the query's window a key is; outside it, less
            than 0, or the kernel size and more.
        ahead: (count, size, seen), how many steps of the group a key is after a query.
    """

    def __init__(self, axis: Axis, length: Any, size: int, device: torch.device) -> None:
        self.axis, self.length = axis, length
        kernel, stride, apart = axis.kernel, axis.stride, axis.dilation
        self.size = -(-size // stride) * stride
        # Windows move by whole strides, with which tiles begin.
        self.seen = self.size - stride + kernel
        self.of_group = (length + self.size * apart - 1) // (self.size * apart)
        self.count = self.of_group * apart
        group, first = (t[:, None] for t in _numbers([apart, self.of_group], device))
        # Groups differ in length by one at most.
        last = (length - 1 - group) // apart
        first = first * self.size
        at = torch.minimum(first + torch.arange(self.size, device=device), last)
        starts = self._starts(at, last)
        begin = starts[:, :1]
        column = torch.arange(self.seen, device=device)
        self.keys = (torch.minimum(begin + column, last) * apart + group).flatten()
        self.slots = column - (starts - begin)[..., None]
        self.ahead = (begin + column)[:, None] - at[..., None]

    def _starts(self, at: Tensor, last: Tensor) -> Tensor:
        """Where in its group the window of a query begins: it ends with the stride's last query if
        causal, else it is about the stride's middle, but for the ends, where it moves inside."""
        kernel, stride = self.axis.kernel, self.axis.stride
        if self.axis.causal:
            leader = torch.minimum(at // stride * stride + stride - 1, last)
            return (leader - kernel + 1).clamp(min=0)
        leader = torch.minimum(at // stride * stride + stride // 2, last)
        return torch.minimum((leader - kernel // 2).clamp(min=0), last + 1 - kernel)


class Tiling:
    """The tiles of all dimensions.

    Args:
        axes: how windows lie along each.
        lengths: L….
        size: queries of a tile along a dimension, about.
        device: where tables are.
    """

    def __init__(
        self, axes: Sequence[Axis], lengths: Sequence[Any], size: int, device: torch.device
    ) -> None:
        pairs = zip(axes, lengths, strict=True)
        self.rows = [_Row(axis, length, size, device) for axis, length in pairs]
        counts = [row.count for row in self.rows]
        self.sizes, self.seen = [r.size for r in self.rows], [r.seen for r in self.rows]
        self.kernels = [axis.kernel for axis in axes]
        self.count = prod(counts)
        self.is_causal = any(axis.causal for axis in axes)
        # Of each dimension, (N, T, S).
        self.slots, self.ahead = [], []
        for row, along in zip(self.rows, _numbers(counts, device), strict=True):
            self.slots.append(row.slots.index_select(0, along))
            self.ahead.append(row.ahead.index_select(0, along))

    def one_hot(self, dim: int, dtype: torch.dtype) -> Tensor:
        """(N, T, S, k) of a dimension: 1 where a key is at a place of a window, else 0."""
        slots = self.slots[dim]
        place = torch.arange(self.kernels[dim], device=slots.device)
        return (slots[..., None] == place).to(dtype)

    def ahead_in_window(self, dim: int) -> Tensor:
        """(N, T, k) of a dimension, how many steps a window's keys are after its query."""
        first = self.ahead[dim][..., :1] - self.slots[dim][..., :1]
        return first + torch.arange(self.kernels[dim], device=first.device)

    def for_all(self, dim: int, table: Tensor) -> Tensor:
        """(N, T, …) of a dimension with ones for the T of others: (N, …, T, …, 1, …)."""
        ones: list[Any] = [1] * len(self.rows)
        ones[dim] = table.shape[1]
        return table.reshape(self.count, *ones, *table.shape[2:])


def tiled(x: Tensor, tiling: Tiling) -> Tensor:
    """(b, h, L…, d) → (b, h, N, ΠT, d); zeros fill the last tiles."""
    n, (batch, heads, *_, d) = len(tiling.rows), x.shape
    # Joined, and not padded: the gradient of padding is a padding by less than nothing, which
    # ONNX's exporter may take for the size of a tensor.
    for i, row in enumerate(tiling.rows):
        sizes = [*x.shape]
        sizes[2 + i] = row.count * row.size - row.length
        x = torch.cat([x, x.new_zeros(sizes)], 2 + i)
    parts = [part for r in tiling.rows for part in (r.of_group, r.size, r.axis.dilation)]
    x = x.reshape(batch, heads, *parts, d)
    numbers = [2 + 3 * i + part for i in range(n) for part in (2, 0)]
    x = x.permute(0, 1, *numbers, *(3 + 3 * i for i in range(n)), -1)
    return x.reshape(batch, heads, tiling.count, prod(tiling.sizes), d)


def untiled(x: Tensor, tiling: Tiling) -> Tensor:
    """(b, h, N, ΠT, d) → (b, h, L…, d)."""
    n, (batch, heads, *_, d) = len(tiling.rows), x.shape
    numbers = [count for r in tiling.rows for count in (r.axis.dilation, r.of_group)]
    x = x.reshape(batch, heads, *numbers, *tiling.sizes, d)
    order = [at for i in range(n) for at in (3 + 2 * i, 2 + 2 * n + i, 2 + 2 * i)]
    x = x.permute(0, 1, *order, -1)
    x = x.reshape(batch, heads, *(row.count * row.size for row in tiling.rows), d)
    for i, row in enumerate(tiling.rows):
        x = x.narrow(2 + i, 0, row.length)
    return x


def gathered(x: Tensor, tiling: Tiling) -> Tensor:
    """(b, h, L…, d) → (b, h, N, ΠS, d): the keys of each tile."""
    n, (batch, heads, *_, d) = len(tiling.rows), x.shape
    for i, row in enumerate(tiling.rows):
        x = x.index_select(2 + i, row.keys)
    x = x.reshape(batch, heads, *(part for r in tiling.rows for part in (r.count, r.seen)), d)
    x = x.permute(0, 1, *(2 + 2 * i for i in range(n)), *(3 + 2 * i for i in range(n)), -1)
    return x.reshape(batch, heads, tiling.count, prod(tiling.seen), d)


def hidden(tiling: Tiling) -> Tensor:
    """(N, ΠT, ΠS), whether a query does not see a key of its tile."""
    seen = []
    for row, slots, ahead in zip(tiling.rows, tiling.slots, tiling.ahead, strict=True):
        inside = (slots >= 0) & (slots < row.axis.kernel)
        seen.append(inside & (ahead <= 0) if row.axis.causal else inside)
    return ~_of_all(tiling, seen)


def hidden_of_window(tiling: Tiling) -> Tensor:
    """(N, ΠT, Πk), whether a key of a query's window is after it, where it sees none such."""
    seen = []
    for dim, row in enumerate(tiling.rows):
        ahead = tiling.ahead_in_window(dim)
        is_any = torch.ones_like(ahead, dtype=torch.bool)
        seen.append(ahead <= 0 if row.axis.causal else is_any)
    return ~_of_all(tiling, seen)


def places(tiling: Tiling, bias: Tensor, *, of_window: bool) -> Tensor:
    """Biases of relative places, for all pairs of a query and a key of its tile, or its window.

    They are chosen by products with ones and zeros, so that gradients are such products, too, and
    not sums in any order.

    Args:
        tiling: of n dimensions.
        bias: (h, (2k - 1)…), the middle one of each dimension where key and query are the same.
        of_window: whether pairs are of windows.

    Returns:
        (h, N, ΠT, ΠS), or (h, N, ΠT, Πk); of keys that no query sees, anything.
    """
    n, heads = len(tiling.rows), bias.shape[0]
    columns = tiling.kernels if of_window else tiling.seen
    found = bias[:, None]
    for dim, kernel in enumerate(tiling.kernels):
        ahead = tiling.ahead_in_window(dim) if of_window else tiling.ahead[dim]
        among = torch.arange(2 * kernel - 1, device=bias.device)
        chosen = (ahead.flatten(1)[..., None] + kernel - 1 == among).to(bias.dtype)
        left = found.shape[3:]
        found = (
            (chosen @ found.flatten(3)).unflatten(3, left)
            if left
            else (chosen @ found[..., None])[..., 0]
        )
        found = found.movedim(2, -1)
    found = found.reshape(
        heads, tiling.count, *(c for pair in zip(tiling.sizes, columns, strict=True) for c in pair)
    )
    order = (2 + 2 * i + part for part in range(2) for i in range(n))
    return found.permute(0, 1, *order).reshape(
        heads, tiling.count, prod(tiling.sizes), prod(columns)
    )


def contracted(scores: Tensor, tiling: Tiling) -> Tensor:
    """(b, h, N, ΠT, ΠS) → (b, h, N, ΠT, Πk): of keys of tiles those of each query's window."""
    return _moved(scores, tiling, tiling.seen, tiling.kernels, is_back=False)


def spread(weights: Tensor, tiling: Tiling) -> Tensor:
    """(b, h, N, ΠT, Πk) → (b, h, N, ΠT, ΠS): the reverse, with zeros elsewhere."""
    return _moved(weights, tiling, tiling.kernels, tiling.seen, is_back=True)


def _moved(
    x: Tensor, tiling: Tiling, given: Sequence[int], wanted: Sequence[int], *, is_back: bool
) -> Tensor:
    """By products with ones and zeros, dimension by dimension; gradients are such products, too."""
    batch, heads = x.shape[:2]
    rows = (batch, heads, tiling.count, *tiling.sizes)
    for dim, columns in enumerate(given):
        # (N, …, k, S), or (N, …, S, k): the first of what is left goes behind what is done.
        table = tiling.one_hot(dim, x.dtype)
        table = tiling.for_all(dim, table if is_back else table.mT)
        x = (table @ x.reshape(*rows, columns, -1)).mT
    return x.reshape(batch, heads, tiling.count, prod(tiling.sizes), prod(wanted))


def _numbers(counts: Sequence[Any], device: torch.device) -> list[Tensor]:
    """Of all combinations of numbers, each in its turn, those of each dimension, (Πcounts,)."""
    numbers = []
    # Added, and not expanded: a view of what is expanded differs for a count of 1.
    zeros = torch.zeros(counts, dtype=torch.int64, device=device)
    for dim, count in enumerate(counts):
        sizes: list[Any] = [1] * len(counts)
        sizes[dim] = count
        along = torch.arange(count, device=device).reshape(sizes)
        numbers.append((along + zeros).flatten())
    return numbers


def _of_all(tiling: Tiling, parts: Sequence[Tensor]) -> Tensor:
    """What holds in each dimension, (N, T, c), in all: (N, ΠT, Πc)."""
    n = len(parts)
    found: Tensor | None = None
    for dim, part in enumerate(parts):
        columns = [1] * n
        columns[dim] = part.shape[2]
        part = tiling.for_all(dim, part.reshape(*part.shape[:2], *columns))
        found = part if found is None else found & part
    assert found is not None
    return found.flatten(1 + n).flatten(1, n)
