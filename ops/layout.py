"""Strides of outputs, as one stated function of the strides of an input of shape (b, d, l).

Kernels (`native/layout.hpp` has the same function), fakes and references all use it: a fake whose
strides differ from the kernel's makes compiled programs read the wrong elements, silently.
"""

import torch
from torch import Tensor

__all__ = ["contiguous_as", "empty_as", "is_channels_last"]


def is_channels_last(t: Tensor) -> bool:
    """Whether a tensor laid out like `t`, of shape (b, d, l), is a transposed (b, l, d) buffer.

    The two comparisons come in this order, and shapes are not looked at, so that tracing with a
    symbolic length adds no guard on it: the stride of time is 1 or the number of channels.
    """
    if t.stride(2) == 1:
        return False
    return bool(t.stride(1) == 1)


def empty_as(t: Tensor) -> Tensor:
    """An uninitialised tensor of `t`'s shape, dtype and device, in the layout like `t`'s."""
    b, d, l = t.shape  # noqa: E741
    if is_channels_last(t):
        return torch.empty((b, l, d), dtype=t.dtype, device=t.device).transpose(1, 2)
    return torch.empty((b, d, l), dtype=t.dtype, device=t.device)


def contiguous_as(value: Tensor, t: Tensor) -> Tensor:
    """A copy of `value`, of `t`'s shape, in the layout like `t`'s; differentiable."""
    # `clone`, since `contiguous` leaves any stride at a dimension of size 1.
    if is_channels_last(t):
        return value.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
    return value.clone(memory_format=torch.contiguous_format)
