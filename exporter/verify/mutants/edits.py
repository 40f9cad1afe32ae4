"""Mistakes in one tensor. Each returns a new tensor of the same shape, dtype and strides.

Where the tensor is too small for the mistake, it comes back as it was.
"""

import torch
from torch import Tensor

__all__ = [
    "EDGE",
    "at_chunk_edge",
    "chunks_last_dropped",
    "first_for_all",
    "has_edge",
    "has_rest_of_one",
    "in_half",
    "longest",
    "misread",
    "moved_by_one",
    "negated",
    "off_in_one_channel",
    "stale_last_step",
    "summed",
    "unwritten",
    "zero",
]

EDGE = 64
"""Where scans, and most tiled kernels, begin a new chunk."""


def longest(t: Tensor) -> int:
    """The dimension that a kernel would walk along: the largest, of several the last."""
    return max(range(t.dim()), key=lambda i: (t.shape[i], i))


def has_edge(t: Tensor) -> bool:
    """Whether a dimension is long enough for two chunks."""
    return t.dim() > 0 and t.shape[longest(t)] > EDGE


def has_rest_of_one(t: Tensor) -> bool:
    """Whether the last chunk has one step."""
    return has_edge(t) and t.shape[longest(t)] % EDGE == 1


def negated(t: Tensor) -> Tensor:
    """The other sign."""
    return t.neg()


def zero(t: Tensor) -> Tensor:
    """Nothing."""
    return torch.zeros_like(t)


def in_half(t: Tensor) -> Tensor:
    """Rounded to bfloat16."""
    if t.is_complex():
        return t.clone().copy_(torch.complex(in_half(t.real), in_half(t.imag)))
    return t.clone().copy_(t.to(torch.bfloat16))


def off_in_one_channel(t: Tensor, by: float) -> Tensor:
    """One index of the second dimension, or of the only one, off by a factor."""
    found = t.clone()
    dim = min(1, t.dim() - 1)
    part = found.select(dim, t.shape[dim] // 2) if t.dim() else found
    part.mul_(1 + by)
    return found


def stale_last_step(t: Tensor) -> Tensor:
    """The last step is that before it; a single one is zero."""
    found = t.clone()
    if t.dim() == 0:
        return found.zero_()
    last = found.select(longest(t), -1)
    if t.shape[longest(t)] > 1:
        last.copy_(t.select(longest(t), -2))
    else:
        last.zero_()
    return found


def at_chunk_edge(t: Tensor) -> Tensor:
    """The first step of the second chunk is the last of the first."""
    found = t.clone()
    if has_edge(t):
        found.select(longest(t), EDGE).copy_(t.select(longest(t), EDGE - 1))
    return found


def chunks_last_dropped(t: Tensor) -> Tensor:
    """The last step is zero where it is alone in its chunk."""
    found = t.clone()
    if has_rest_of_one(t):
        found.select(longest(t), -1).zero_()
    return found


def first_for_all(t: Tensor) -> Tensor:
    """The first of the batch for all of it."""
    return t.clone().copy_(t[:1].expand(t.shape)) if t.dim() else t.clone()


def moved_by_one(t: Tensor) -> Tensor:
    """Each index of the second dimension, or of the only one, has what is its neighbour's."""
    return t.clone().copy_(t.roll(1, min(1, t.dim() - 1))) if t.dim() else t.clone()


def summed(t: Tensor) -> Tensor:
    """Its sum, throughout."""
    return t.clone().copy_(t.sum().expand(t.shape))


def unwritten(t: Tensor) -> Tensor:
    """One index of the second dimension, or of the only one, is memory that nobody wrote."""
    found = torch.empty_like(t)
    if not t.dim():
        return found
    dim = min(1, t.dim() - 1)
    skipped = t.shape[dim] // 2
    for part in (slice(0, skipped), slice(skipped + 1, None)):
        index = (slice(None),) * dim + (part,)
        found[index] = t[index]
    return found


def misread(t: Tensor) -> Tensor:
    """Its memory read as if it were contiguous, where there is as much of it."""
    needed = t.storage_offset() + t.numel()
    if t.is_contiguous() or needed * t.element_size() > t.untyped_storage().nbytes():
        return t
    return t.as_strided(t.shape, torch.empty(t.shape, device="meta").stride(), t.storage_offset())
