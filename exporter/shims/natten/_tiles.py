"""Windows of neighbours along each dimension, as tiles of queries and what all of a tile see.

A tile is some queries in a row, `size` of them, of one dilation group. Their windows lie within
`seen` keys, so scores of a tile are one matrix product, and each query's own are among them. In the
shapes here, n is the number of dimensions, L… are their lengths, T… and S… sizes and keys of tiles,
k… kernel sizes, and N is the number of tiles, over all dimensions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "Axis",
    "Tiles",
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


class Tiles:
    """The tiles of one dimension.

    Attributes:
        size: queries in a tile.
        seen: keys of a tile.
        count: tiles, over all groups.
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
        group = torch.arange(apart, device=device)[:, None, None]
        # Groups differ in length by one at most.
        last = (length - 1 - group) // apart
        first = torch.arange(self.of_group, device=device)[:, None] * self.size
        at = torch.minimum(first + torch.arange(self.size, device=device), last)
        starts = self._starts(at, last)
        begin = starts[..., :1]
        column = torch.arange(self.seen, device=device)
        self.keys = (torch.minimum(begin + column, last) * apart + group).flatten()
        self.slots = (column - (starts - begin)[..., None]).flatten(0, 1)
        self.ahead = ((begin + column)[..., None, :] - at[..., None]).flatten(0, 1)

    def _starts(self, at: Tensor, last: Tensor) -> Tensor:
        """Where in its group the window of a query begins: it ends with the stride's last query if
        causal, else it is about the stride's middle, but for the ends, where it moves inside."""
        kernel, stride = self.axis.kernel, self.axis.stride
        if self.axis.causal:
            leader = torch.minimum(at // stride * stride + stride - 1, last)
            return (leader - kernel + 1).clamp(min=0)
        leader = torch.minimum(at // stride * stride + stride // 2, last)
        return torch.minimum((leader - kernel // 2).clamp(min=0), last + 1 - kernel)

    def is_seen(self) -> Tensor:
        """(count, size, seen), whether a query sees a key."""
        seen = (self.slots >= 0) & (self.slots < self.axis.kernel)
        return seen & (self.ahead <= 0) if self.axis.causal else seen

    def one_hot(self, dtype: torch.dtype) -> Tensor:
        """(count, size, seen, kernel): 1 where a key is at a place of a window, else 0."""
        return (
            self.slots[..., None] == torch.arange(self.axis.kernel, device=self.keys.device)
        ).to(dtype)

    def of_window(self, of_keys: Tensor) -> Tensor:
        """(count, size, seen), which grows by one from key to key, for a window's: (…, kernel)."""
        first = of_keys[..., :1] - self.slots[..., :1]
        return first + torch.arange(self.axis.kernel, device=self.keys.device)


def tiled(x: Tensor, tiles: Sequence[Tiles]) -> Tensor:
    """(b, h, L…, d) → (b, h, N, ΠT, d); zeros fill the last tiles."""
    n = len(tiles)
    for i, t in enumerate(tiles):
        at = 2 + 3 * i
        whole = t.count * t.size
        x = F.pad(x, (0, 0) * (x.dim() - 1 - at) + (0, whole - t.length))
        x = x.unflatten(at, (t.of_group, t.size, t.axis.dilation))
    numbers = [2 + 3 * i + part for i in range(n) for part in (2, 0)]
    x = x.permute(0, 1, *numbers, *(3 + 3 * i for i in range(n)), -1)
    return x.flatten(2, 1 + 2 * n).flatten(3, -2)


def untiled(x: Tensor, tiles: Sequence[Tiles]) -> Tensor:
    """(b, h, N, ΠT, d) → (b, h, L…, d)."""
    n = len(tiles)
    numbers = [count for t in tiles for count in (t.axis.dilation, t.of_group)]
    x = x.unflatten(3, [t.size for t in tiles]).unflatten(2, numbers)
    order = [at for i in range(n) for at in (3 + 2 * i, 2 + 2 * n + i, 2 + 2 * i)]
    x = x.permute(0, 1, *order, -1)
    for i, t in enumerate(tiles):
        x = x.flatten(2 + i, 4 + i).narrow(2 + i, 0, t.length)
    return x


def gathered(x: Tensor, tiles: Sequence[Tiles]) -> Tensor:
    """(b, h, L…, d) → (b, h, N, ΠS, d): the keys of each tile."""
    n = len(tiles)
    for i, t in enumerate(tiles):
        x = x.index_select(2 + i, t.keys)
    for i, t in enumerate(tiles):
        x = x.unflatten(2 + 2 * i, (t.count, t.seen))
    x = x.permute(0, 1, *(2 + 2 * i for i in range(n)), *(3 + 2 * i for i in range(n)), -1)
    return x.flatten(2, 1 + n).flatten(3, -2)


def hidden(tiles: Sequence[Tiles]) -> Tensor:
    """(N, ΠT, ΠS), whether a query does not see a key of its tile."""
    return ~_of_all(tiles, [t.is_seen() for t in tiles])


def hidden_of_window(tiles: Sequence[Tiles]) -> Tensor:
    """(N, ΠT, Πk), whether a key of a query's window is after it, where it sees none such."""
    ahead = [t.of_window(t.ahead) for t in tiles]
    parts = [
        at <= 0 if t.axis.causal else torch.ones_like(at, dtype=torch.bool)
        for t, at in zip(tiles, ahead, strict=True)
    ]
    return ~_of_all(tiles, parts)


def places(tiles: Sequence[Tiles], bias: Tensor, *, of_window: bool) -> Tensor:
    """Biases of relative places, for all pairs of a query and a key of its tile, or its window.

    Args:
        tiles: of n dimensions.
        bias: (h, (2k - 1)…), the middle one of each dimension where key and query are the same.
        of_window: whether pairs are of windows.

    Returns:
        (h, N, ΠT, ΠS), or (h, N, ΠT, Πk); of keys that no query sees, anything.
    """
    for t in tiles:
        ahead = t.of_window(t.ahead) if of_window else t.ahead
        among = torch.arange(2 * t.axis.kernel - 1, device=bias.device)
        # A product, so that the gradient is one, too, and not a sum in any order.
        chosen = (ahead[..., None] + t.axis.kernel - 1 == among).to(bias.dtype)
        bias = torch.tensordot(bias, chosen.flatten(0, 2), ([1], [1]))
    for i, t in enumerate(tiles):
        columns = t.axis.kernel if of_window else t.seen
        bias = bias.unflatten(1 + 3 * i, (t.count, t.size, columns))
    n = len(tiles)
    bias = bias.permute(0, *(1 + 3 * i + part for part in range(3) for i in range(n)))
    return bias.flatten(1 + 2 * n, -1).flatten(1 + n, 2 * n).flatten(1, n)


def contracted(scores: Tensor, tiles: Sequence[Tiles]) -> Tensor:
    """(b, h, N, ΠT, ΠS) → (b, h, N, ΠT, Πk): of keys of tiles those of each query's window."""
    return _moved(scores, tiles, [t.seen for t in tiles], "s", "k")


def spread(weights: Tensor, tiles: Sequence[Tiles]) -> Tensor:
    """(b, h, N, ΠT, Πk) → (b, h, N, ΠT, ΠS): the reverse, with zeros elsewhere."""
    return _moved(weights, tiles, [t.axis.kernel for t in tiles], "k", "s")


def _moved(
    x: Tensor, tiles: Sequence[Tiles], columns: Sequence[int], given: str, wanted: str
) -> Tensor:
    """By products with ones and zeros, dimension by dimension; gradients are such products, too."""
    n = len(tiles)
    x = x.unflatten(4, columns).unflatten(3, [t.size for t in tiles])
    x = x.unflatten(2, [t.count for t in tiles])
    numbers, rows, left = "abc"[:n], "uvw"[:n], "xyz"[:n]
    for i, t in enumerate(tiles):
        before = left[:i] + given + left[i + 1 :]
        after = left[:i] + wanted + left[i + 1 :]
        table = f"{numbers[i]}{rows[i]}sk"
        rule = f"gh{numbers}{rows}{before},{table}->gh{numbers}{rows}{after}"
        x = torch.einsum(rule, x, t.one_hot(x.dtype))
    return x.flatten(2 + 2 * n, -1).flatten(2 + n, 1 + 2 * n).flatten(2, 1 + n)


def _of_all(tiles: Sequence[Tiles], parts: Sequence[Tensor]) -> Tensor:
    """What holds in each dimension, (count, size, c), in all: (N, ΠT, Πc)."""
    n = len(tiles)
    found: Tensor | None = None
    for i, part in enumerate(parts):
        sizes: list[Any] = [1] * (3 * n)
        sizes[i], sizes[n + i], sizes[2 * n + i] = part.shape
        part = part.reshape(sizes)
        found = part if found is None else found & part
    assert found is not None
    return found.flatten(2 * n, -1).flatten(n, 2 * n - 1).flatten(0, n - 1)
