"""Operators that ONNX lacks, in terms of those that it has.

A formula for `<operator>_backward` is the vector-Jacobian product of the operator.
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, product
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._decomp import decomposition_table
from torch._ops import OpOverload
from torch.export import ExportedProgram

from fuseport.exporter.formats._lowering import Table

__all__ = ["decompositions"]

aten = torch.ops.aten


def decompositions(exported: ExportedProgram) -> Table:
    """For the operators in a program that ONNX cannot take as they are, what to take instead."""
    attention = aten.scaled_dot_product_attention.default
    table: dict[Any, Callable[..., Any]] = {}
    for node in exported.graph.nodes:
        target = node.target
        if isinstance(target, OpOverload) and "backward" in target._schema.name:
            if target in decomposition_table:
                table[target] = decomposition_table[target]
            elif target.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd):
                table[target] = target.decompose
        elif target is attention and node.args[0].meta["val"].dim() != 4:
            table[target] = _attention  # torch.onnx knows it of rank 4 only
    return {**table, **_OWN}


def _attention(*arguments: Any, **options: Any) -> Any:
    return aten._scaled_dot_product_attention_math.default(*arguments, **options)[0]


def _split(x: Tensor, size: int, dim: int = 0) -> tuple[Tensor, ...]:
    length = x.shape[dim]
    return tuple(aten.slice.Tensor(x, dim, i, i + size) for i in range(0, length, size))


def _split_with_sizes(x: Tensor, sizes: Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    ends = list(accumulate(sizes))
    return tuple(
        aten.slice.Tensor(x, dim, end - size, end) for size, end in zip(sizes, ends, strict=True)
    )


def _unbind(x: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    return tuple(aten.select.int(x, dim, i) for i in range(x.shape[dim]))


def _unfold_backward(
    cotangent: Tensor, sizes: Sequence[int], dim: int, size: int, step: int
) -> Tensor:
    # torch's own decomposition has indices of 32 bits, which ONNX's scatter does not take.
    dim %= len(sizes)
    starts = torch.arange(cotangent.shape[dim], device=cotangent.device) * step
    index = (starts[:, None] + torch.arange(size, device=cotangent.device)).flatten()
    values = cotangent.movedim(-1, dim + 1).flatten(dim, dim + 1).movedim(dim, 0)
    zeros = cotangent.new_zeros(sizes).movedim(dim, 0)
    gradient: Tensor = aten.index_put.default(zeros, [index], values, True)
    return gradient.movedim(0, dim)


def _embedding_dense_backward(
    cotangent: Tensor, indices: Tensor, rows: int, padding_row: int, by_frequency: bool
) -> Tensor:
    # torch's own decomposition goes through a masked operator that ONNX lacks.
    if by_frequency:
        raise ValueError("embedding with scale_grad_by_freq has no ONNX form of its gradient")
    if padding_row >= 0:
        cotangent = cotangent * (indices != padding_row).unsqueeze(-1).to(cotangent.dtype)
    # Summed in float32 at least: rows may occur often, and few runtimes scatter half types.
    wide = torch.promote_types(cotangent.dtype, torch.float32)
    zeros = cotangent.new_zeros((rows, cotangent.shape[-1]), dtype=wide)
    gradient: Tensor = aten.index_put.default(zeros, [indices], cotangent.to(wide), True)
    return gradient.to(cotangent.dtype)


def _convolution_backward(
    cotangent: Tensor,
    x: Tensor,
    weight: Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    axes = range(x.dim() - 2)
    none = [0 for _ in axes]
    dx = dweight = dbias = None
    if mask[0] and transposed:
        dx = aten.convolution.default(
            cotangent, weight, None, stride, padding, dilation, False, none, groups
        )
    elif mask[0]:
        dx = _spread(cotangent, weight, x.shape[2:], stride, padding, dilation, groups)
    if mask[1]:
        seen, seeing = (x, cotangent) if transposed else (cotangent, x)
        dweight = _convolution_dweight(seen, seeing, weight, stride, padding, dilation, groups)
    if mask[2]:
        dbias = cotangent.sum([0, *(2 + i for i in axes)])
    return dx, dweight, dbias


def _spread(
    cotangent: Tensor,
    weight: Tensor,
    sizes: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """The gradient of a convolution's input, whose spatial `sizes` are given."""
    # Strides may leave up to stride - 1 elements over at the far end, which the convolution saw
    # only as a part of windows, or not at all: compute that far, and cut.
    none = [0 for _ in stride]
    over = [s - 1 for s in stride]
    dx: Tensor = aten.convolution.default(
        cotangent, weight, None, stride, none, dilation, True, over, groups
    )
    for axis, size in enumerate(sizes):
        dx = aten.slice.Tensor(dx, 2 + axis, padding[axis], padding[axis] + size)
    return dx


def _avg_pool_backward(
    cotangent: Tensor,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Tensor:
    if ceil_mode:
        raise ValueError("average pooling with ceil_mode has no ONNX form of its gradient")
    stride = stride or kernel  # an empty list stands for the kernel
    one_channel = x.new_ones((1, 1, *kernel))
    none = [0 for _ in kernel]
    each = [1 for _ in kernel]
    count: Any = divisor_override or math.prod(kernel)
    if not count_include_pad and divisor_override is None:
        ones = x.new_ones((1, 1, *x.shape[2:]))
        count = aten.convolution.default(
            ones, one_channel, None, stride, padding, each, False, none, 1
        )
    weight = one_channel.expand(x.shape[1], 1, *kernel)
    return _spread(cotangent / count, weight, x.shape[2:], stride, padding, each, x.shape[1])


def _convolution_dweight(
    cotangent: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """One product per tap of the filter: ONNX convolves with constant group counts only."""
    sizes = weight.shape[2:]
    padded = torch.nn.functional.pad(x, [p for p in reversed(padding) for _ in range(2)])
    taps = []
    for tap in product(*(range(size) for size in sizes)):
        window = padded
        for axis, offset in enumerate(tap):
            begin = offset * dilation[axis]
            end = begin + (cotangent.shape[2 + axis] - 1) * stride[axis] + 1
            window = aten.slice.Tensor(window, 2 + axis, begin, end, stride[axis])
        if weight.shape[1] == 1 and groups == x.shape[1] == cotangent.shape[1]:  # depthwise
            taps.append((window * cotangent).flatten(2).sum((0, 2)).unsqueeze(1))
            continue
        # (b, g, o, p)·(b, g, p, i), p positions, summed over b
        left = cotangent.flatten(2).unflatten(1, (groups, -1))
        right = window.flatten(2).unflatten(1, (groups, -1)).transpose(2, 3)
        taps.append(torch.matmul(left, right).sum(0).flatten(0, 1))
    return torch.stack(taps, -1).reshape(weight.shape)


_OWN: Table = {
    # Symbolic nodes are contiguous where the ops are laid out like their inputs. A view may not fit
    # any more then; a reshape always does.
    aten.view.default: aten.reshape.default,
    # torch.onnx makes sequences of these, which few runtimes know, and of few types.
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_with_sizes,
    aten.unbind.int: _unbind,
    aten.avg_pool2d_backward.default: _avg_pool_backward,
    aten.avg_pool3d_backward.default: _avg_pool_backward,
    aten.convolution_backward.default: _convolution_backward,
    aten.embedding_dense_backward.default: _embedding_dense_backward,
    aten.unfold_backward.default: _unfold_backward,
}
