"""Pools, where torch fixes no sizes in another number of dimensions."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import SymInt, Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils import _pytree as pytree

__all__ = ["POOLS"]


def _max_pool1d(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    # In one dimension as in two, one of them of size 1.
    pooled: Any = F.max_pool2d_with_indices(
        input.unsqueeze(-2),
        (1, int(_single(kernel_size))),
        (1, int(_single(kernel_size if stride is None else stride))),
        (0, int(_single(padding))),
        (1, int(_single(dilation))),
        ceil_mode,
    )
    values, indices = pytree.tree_map(lambda t: t.squeeze(-2), pooled)
    return (values, indices) if return_indices else values


def _adaptive_avg_pool1d(input: Tensor, output_size: Any) -> Any:
    size = _single(output_size)
    if not isinstance(size, SymInt):
        return NotImplemented
    wide: Any = (1, size)
    return F.adaptive_avg_pool2d(input.unsqueeze(-2), wide).squeeze(-2)


def _interpolate(
    input: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    *args: Any,
    **by: Any,
) -> Any:
    # By areas, of one dimension, it is that pool.
    if mode != "area" or input.dim() != 3:
        return NotImplemented

    def planar(value: Any) -> Any:
        return None if value is None else (1, _single(value))

    wide = input.unsqueeze(-2)
    return F.interpolate(wide, planar(size), planar(scale_factor), mode, *args, **by).squeeze(-2)


def _adaptive_max_pool2d(input: Tensor, output_size: Any, return_indices: bool = False) -> Any:
    # A size that stays as it is, as None says, torch takes for a number.
    if return_indices or not isinstance(output_size, Sequence):
        return NotImplemented
    height, width = (
        None if n is None or statically_known_true(n == there) else n
        for n, there in zip(output_size, input.shape[-2:], strict=True)
    )
    if height is not None and width is not None:
        return NotImplemented
    if width is not None:
        rows = F.adaptive_max_pool1d(input.flatten(0, -2).unsqueeze(1), width)
        return rows.reshape(*input.shape[:-1], -1)
    return input.clone() if height is None else _adaptive_max_pool2d(input.mT, (None, height)).mT


def _single(value: Any) -> Any:
    """Of one dimension: that itself, or all of a sequence."""
    return value[0] if isinstance(value, Sequence) else value


POOLS: Mapping[Any, Callable[..., Any]] = {
    F.interpolate: _interpolate,
    F.max_pool1d: _max_pool1d,
    F.adaptive_avg_pool1d: _adaptive_avg_pool1d,
    F.adaptive_max_pool2d: _adaptive_max_pool2d,
}
"""What computes the same, or gives NotImplemented, where the function itself fixes nothing."""
