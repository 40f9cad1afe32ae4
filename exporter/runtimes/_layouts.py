"""Memory layouts that a case hands its tensors over in; the values are the same in all of them."""

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["LAYOUTS", "apart", "lay_out"]

LAYOUTS = ("contiguous", "transposed", "sliced", "expanded")


def lay_out(tensor: Tensor, layout: str) -> Tensor:
    """`tensor`, with other strides.

    Args:
        tensor: contiguous.
        layout: `contiguous`; `transposed`, its dimensions in memory in reverse order; `sliced`,
            every second element of a larger buffer, which begins before it; `expanded`, with stride
            0 along every dimension but the last, where it is constant along these.
    """
    if not tensor.numel():
        return tensor
    if layout == "transposed" and tensor.dim() > 1:
        order = list(reversed(range(tensor.dim())))
        return tensor.permute(order).contiguous().permute(order)
    if layout == "sliced" and tensor.dim() > 0:
        buffer = tensor.new_zeros((*tensor.shape[:-1], 2 * tensor.shape[-1] + 3))
        view = buffer[..., 3::2]
        view.copy_(tensor)
        return view
    if layout == "expanded" and tensor.dim() > 1 and tensor.is_floating_point():
        row = tensor[(0,) * (tensor.dim() - 1)]
        if torch.equal(row.expand(tensor.shape), tensor):
            return row.expand(tensor.shape)
    return tensor


def apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, no two of them sharing memory: safetensors files do not allow that."""
    storages = Counter(tensor.untyped_storage().data_ptr() for tensor in tensors.values())
    return {
        name: t.clone() if storages[t.untyped_storage().data_ptr()] > 1 else t
        for name, t in tensors.items()
    }
