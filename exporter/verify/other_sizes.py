"""Other sizes than those of the export, at which something else may be so."""

import random
from collections.abc import Iterator, Mapping

__all__ = ["around", "one_by_one", "scattered"]

_WIDE = 128  # how far from the export's sizes something else is looked for
_NEAR = 16  # how far from the export's are sizes next to them


def around(usual: Mapping[str, int], reach: int = _NEAR) -> Iterator[tuple[str, int]]:
    """Other sizes of each dimension, by its name, the nearest first."""
    for distance in range(1, reach + 1):
        for name, size in usual.items():
            yield from ((name, other) for other in (size + distance, size - distance) if other > 0)


def scattered(usual: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Sizes of one dimension, the nearest first, then of all of them together."""
    for name, other in around(usual, _WIDE):
        yield {**usual, name: other}
    if len(usual) > 1:
        draw = random.Random(0)
        for _ in range(_WIDE):
            yield {name: draw.randint(1, 2 * size) for name, size in usual.items()}


def one_by_one(sizes: Mapping[str, int], usual: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """The sizes, and each of them among those of the export."""
    yield dict(sizes)
    for name, size in sizes.items():
        yield {**usual, name: size}
