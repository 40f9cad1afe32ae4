"""Memory layouts that callers of ops have, as copies of a tensor: what cases are laid out in.

Values stay, but for those of expanded layouts. What lies between the elements of a buffer is NaN,
or -1 where there is no NaN, so that a kernel that reads it is seen.
"""

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = [
    "Layout",
    "expanded_first",
    "expanded_last",
    "expanded_time",
    "heads_first",
    "offset_channels",
    "offset_last",
    "sliced",
    "time_last",
    "transposed",
    "transposed_split",
]

Layout = Callable[[Tensor], Tensor]
"""Copies a tensor into some memory layout."""


def transposed(t: Tensor) -> Tensor:
    """The last two dimensions trade places in memory, of size 1 too."""
    if t.dim() < 2:
        return t
    return t.mT.clone(memory_format=torch.contiguous_format).mT


def sliced(t: Tensor) -> Tensor:
    """Every second element of the last dimension of a larger buffer, after an odd offset."""
    return _buffer(t, *t.shape[:-1], 2 * t.shape[-1] + 1)[..., 1::2].copy_(t)


def offset_last(t: Tensor) -> Tensor:
    """A part of a wider last dimension: one of the outputs of a split projection."""
    d = t.shape[-1]
    return _buffer(t, *t.shape[:-1], 2 * d + 1)[..., d : 2 * d].copy_(t)


def offset_channels(t: Tensor) -> Tensor:
    """A part of a wider second dimension: channels of a split projection."""
    d = t.shape[1]
    return _buffer(t, t.shape[0], 2 * d + 1, *t.shape[2:])[:, d : 2 * d].copy_(t)


def transposed_split(t: Tensor) -> Tensor:
    """Channels last inside a wider (b, l, 2d) projection, as `x, z = in_proj(h).chunk(2)` gives."""
    b, d, l = t.shape  # noqa: E741
    return _buffer(t, b, l, 2 * d).transpose(1, 2)[:, d:].copy_(t)


def time_last(t: Tensor) -> Tensor:
    """Time comes last in memory, as after a convolution over (b, channels, l)."""
    moved: Tensor = t.movedim(1, -1).contiguous().movedim(-1, 1)
    return moved


def heads_first(t: Tensor) -> Tensor:
    """Heads come before time, or positions, in memory, as attention has them."""
    return t.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


def expanded_time(t: Tensor) -> Tensor:
    """The first step for all: stride 0."""
    return t[:, :1].expand(t.shape)


def expanded_first(t: Tensor) -> Tensor:
    """The first of the leading dimension for all: stride 0."""
    return t[:1].expand(t.shape)


def expanded_last(t: Tensor) -> Tensor:
    """The first of the last dimension for all: stride 0."""
    return t[..., :1].expand(t.shape)


def _buffer(t: Tensor, *shape: int) -> Tensor:
    return t.new_full(shape, float("nan") if t.is_floating_point() or t.is_complex() else -1)
