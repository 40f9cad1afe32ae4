"""Random numbers of `triton.language`, which are a function of a seed and of places.

Philox-4x32 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Words of 32
bits are int64 here, from 0 on.
"""

import math
from typing import Any

import torch
from torch import Tensor

from fuseport.exporter.shims._triton.shapes import size_of
from fuseport.exporter.shims._triton.values import Value, as_value

__all__ = ["RANDOM", "philox"]

_WORD = 0xFFFFFFFF
_ROUND = (0xD2511F53, 0xCD9E8D57)
_KEY = (0x9E3779B9, 0xBB67AE85)


def philox(counter: list[Tensor], key: list[Tensor], rounds: int) -> list[Tensor]:
    """Four random words.

    Args:
        counter: four words.
        key: two words.
        rounds: how often they are mixed, 10 by default in Triton.
    """
    a, b, c, d = counter
    first, second = key
    for _ in range(rounds):
        high_a, low_a = _product(_ROUND[0], a)
        high_c, low_c = _product(_ROUND[1], c)
        a, b, c, d = high_c ^ b ^ first, low_c, high_a ^ d ^ second, low_a
        first, second = (first + _KEY[0]) & _WORD, (second + _KEY[1]) & _WORD
    return [a, b, c, d]


def _product(factor: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """Of two words, the high and the low word, by halves of one: none is beyond int64."""
    upper, lower = factor * (word >> 16), factor * (word & 0xFFFF)
    return (upper + (lower >> 16)) >> 16, (((upper & 0xFFFF) << 16) + lower) & _WORD


def _words(seed: Any, offset: Any, n_rounds: Any) -> tuple[list[Tensor], int]:
    place = as_value(offset)
    rank = max(place.rank, as_value(seed).rank)
    at = place.at_rank(rank).tensor.to(torch.int64)
    given = as_value(seed).at_rank(rank).tensor if as_value(seed).number is None else None
    if given is None:
        given = torch.full([1] * at.dim(), size_of(as_value(seed)), device=at.device)
    given = given.to(torch.int64)
    none = torch.zeros_like(at)
    wide = place.dtype.primitive_bitwidth > 32
    counter = [at & _WORD, (at >> 32) & _WORD if wide else none, none, none]
    key = [given & _WORD, (given >> 32) & _WORD]
    return philox(counter, key, int(n_rounds)), rank


def _uniform(word: Tensor) -> Tensor:
    """A word as a number from 0 to 1, in float32: 31 bits of it, by its sign as an int32."""
    signed = torch.where(word > _WORD >> 1, _WORD - word, word)
    return signed.to(torch.float32) * 4.6566127342e-10


def _normal(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Two normal numbers of two words, by Box and Muller."""
    radius = torch.sqrt(-2.0 * torch.log(_uniform(first).clamp(min=1e-7)))
    angle = (2 * math.pi) * _uniform(second)
    return radius * torch.cos(angle), radius * torch.sin(angle)


def rand4x(seed: Any, offsets: Any, n_rounds: Any = 10, **by: Any) -> tuple[Value, ...]:
    """Four blocks of numbers from 0 to 1."""
    words, rank = _words(seed, offsets, n_rounds)
    return tuple(Value(_uniform(word), rank) for word in words)


def randn4x(seed: Any, offsets: Any, n_rounds: Any = 10, **by: Any) -> tuple[Value, ...]:
    """Four blocks of normal numbers."""
    (a, b, c, d), rank = _words(seed, offsets, n_rounds)
    return tuple(Value(x, rank) for x in (*_normal(a, b), *_normal(c, d)))


def rand(seed: Any, offset: Any, n_rounds: Any = 10, **by: Any) -> Value:
    """A block of numbers from 0 to 1."""
    return rand4x(seed, offset, n_rounds)[0]


def randn(seed: Any, offset: Any, n_rounds: Any = 10, **by: Any) -> Value:
    """A block of normal numbers."""
    return randn4x(seed, offset, n_rounds)[0]


RANDOM: dict[str, Any] = {f.__name__: f for f in (rand, rand4x, randn, randn4x)}
"""By name, functions of `triton.language`."""
