"""Convolutions in as many groups as there are samples, or whatever number is a size.

StyleGAN2 has a filter for each sample: `conv2d(x.view(1, b * c, h, w), filters, groups=b)`. ONNX
writes the number of groups into a node, and so knows no such. Here each tap of a filter is a batch
of products of matrices, one for each group, over the places that the tap sees.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["convolution", "transposed_convolution"]


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    groups: Any = 1,
) -> Any:
    """`torch.nn.functional.conv1d` to `conv3d`; NotImplemented where `groups` is a number."""
    dims = weight.dim() - 2
    if not isinstance(groups, torch.SymInt) or x.dim() != dims + 2:
        return NotImplemented
    x = F.pad(x, [p for size in reversed(_each(padding, dims)) for p in (size, size)])
    filters = weight.unflatten(0, (groups, weight.shape[0] // groups))
    return _biased(_of_taps(x, filters, _each(stride, dims), _each(dilation, dims)), bias)


def transposed_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    output_padding: Sequence[int] = (0,),
    groups: Any = 1,
    dilation: Sequence[int] = (1,),
) -> Any:
    """`torch.nn.functional.conv_transpose1d` to `3d`; NotImplemented where `groups` is a number.

    It is the convolution with the filters back to front, of x with zeros between its places.
    """
    dims = weight.dim() - 2
    if not isinstance(groups, torch.SymInt) or x.dim() != dims + 2:
        return NotImplemented
    dilation = _each(dilation, dims)
    for dim, step in enumerate(_each(stride, dims), 2):
        if step > 1:
            places = x.shape[dim]
            spread = F.pad(x.unsqueeze(dim + 1), [0, 0] * (dims + 1 - dim) + [0, step - 1])
            x = spread.flatten(dim, dim + 1).narrow(dim, 0, (places - 1) * step + 1)
    around: list[int] = []
    each = zip(
        weight.shape[2:], dilation, _each(padding, dims), _each(output_padding, dims), strict=True
    )
    for size, apart, less, more in reversed([*each]):
        reach = apart * (size - 1) - less
        around += [reach, reach + more]
    x = F.pad(x, around)
    filters = weight.unflatten(0, (groups, weight.shape[0] // groups)).transpose(1, 2)
    filters = filters.flip([*range(3, 3 + dims)])
    return _biased(_of_taps(x, filters, [1] * dims, dilation), bias)


def _of_taps(x: Tensor, filters: Tensor, stride: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """(n, g·o, …) of x, (n, g·i, …), which is padded, and filters (g, o, i, …)."""
    groups, outputs, inputs, *sizes = filters.shape
    x = x.unflatten(1, (groups, inputs))
    found = [
        (places - apart * (size - 1) - 1) // step + 1
        for places, size, step, apart in zip(x.shape[3:], sizes, stride, dilation, strict=True)
    ]
    total: Tensor | None = None
    for tap in itertools.product(*(range(size) for size in sizes)):
        seen, filter_ = x, filters
        for dim, (at, count, step, apart) in enumerate(
            zip(tap, found, stride, dilation, strict=True), 3
        ):
            first = at * apart
            seen = seen.narrow(dim, first, (count - 1) * step + 1)
            if step > 1:
                seen = seen[(slice(None),) * dim + (slice(None, None, step),)]
            filter_ = filter_.select(3, at)
        product = filter_ @ seen.flatten(3)
        total = product if total is None else total + product
    assert total is not None
    return total.reshape(x.shape[0], groups * outputs, *found)


def _biased(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y + bias.view(-1, *[1] * (y.dim() - 2))


def _each(given: int | Sequence[int], dims: int) -> list[int]:
    numbers = [given] if isinstance(given, int) else [*given]
    return numbers * dims if len(numbers) == 1 else numbers
