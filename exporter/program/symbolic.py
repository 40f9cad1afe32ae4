"""Sizes that stay dynamic in a capture where torch's own code fixes them.

In `x.shape[2:].numel()`, in pooling, in what is broadcast, in the steps of recurrent layers.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fuseport.exporter.program._recurrent import recurrent

__all__ = ["Symbolic"]


class Symbolic(TorchFunctionMode):
    """Computes the same by other functions of torch where a size would become a number."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.max_pool1d:
            return _max_pool1d(*args, **(kwargs or {}))
        if func in (torch.take_along_dim, Tensor.take_along_dim):
            return _take_along_dim(*args, **(kwargs or {}))
        layers = recurrent(func, args, kwargs or {})
        if layers is not None:
            return layers
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Size) and any(
            isinstance(size, torch.SymInt) for size in result
        ):
            return _Sizes(result)
        return result


class _Sizes(tuple[Any, ...]):
    """A `torch.Size` whose `numel` is no number where the sizes are none.

    Torch's own cannot be derived from; for `isinstance` this is one.
    """

    __class__ = property(lambda self: torch.Size)

    def numel(self) -> Any:
        return math.prod(self)

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return _Sizes(found) if isinstance(index, slice) else found


def _max_pool1d(
    x: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    # In one dimension as in two, one of them of size 1.
    def single(value: Any) -> int:
        return int(value[0] if isinstance(value, Sequence) else value)

    pooled: Any = F.max_pool2d_with_indices(
        x.unsqueeze(-2),
        (1, single(kernel_size)),
        (1, single(kernel_size if stride is None else stride)),
        (0, single(padding)),
        (1, single(dilation)),
        ceil_mode,
    )
    values, indices = pytree.tree_map(lambda t: t.squeeze(-2), pooled)
    return (values, indices) if return_indices else values


def _take_along_dim(input: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    # Sizes that are alike stay dynamic; of two, the one that is 1 is expanded.
    if dim is None:
        return input.reshape(-1).gather(0, indices.reshape(-1))
    dim %= input.dim()

    def expanded(t: Tensor, like: Tensor) -> Tensor:
        sizes = enumerate(zip(t.shape, like.shape, strict=True))
        return t.expand([b if i != dim and _is_one(a) else a for i, (a, b) in sizes])

    return expanded(input, indices).gather(dim, expanded(indices, input))


def _is_one(size: int | torch.SymInt) -> bool:
    return isinstance(size, int) and size == 1
