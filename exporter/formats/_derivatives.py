"""Derivatives that ONNX has no operator for, in terms of those that it has.

Each formula is the vector-Jacobian product of the operator it is named after.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import Any

import torch
from onnxscript import opset18 as op
from torch import Tensor
from torch._decomp import decomposition_table

__all__ = ["decompositions", "translations"]

aten = torch.ops.aten


def decompositions(targets: Iterable[Any]) -> dict[Any, Callable[..., Any]]:
    """How to decompose those of `targets` that are derivatives; torch's way where it has one."""
    table = {
        target: decomposition_table[target]
        for target in targets
        if "backward" in target._schema.name and target in decomposition_table
    }
    return {
        **table,
        aten.convolution_backward.default: _convolution_backward,
        aten.embedding_dense_backward.default: _embedding_dense_backward,
    }


def translations() -> dict[Any, Callable[..., Any]]:
    """Derivatives that torch does not decompose on export, as ONNX directly."""
    return {aten.silu_backward.default: _silu_backward}


def _embedding_dense_backward(
    cotangent: Tensor, indices: Tensor, rows: int, padding_row: int, by_frequency: bool
) -> Tensor:
    # torch's own decomposition goes through a masked operator that ONNX lacks.
    if by_frequency:
        raise ValueError("embedding with scale_grad_by_freq has no ONNX form of its gradient")
    if padding_row >= 0:
        cotangent = cotangent * (indices != padding_row).unsqueeze(-1).to(cotangent.dtype)
    zeros = cotangent.new_zeros((rows, cotangent.shape[-1]))
    gradient: Tensor = aten.index_put.default(zeros, [indices], cotangent, True)
    return gradient


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
    if transposed:
        raise ValueError("transposed convolution has no ONNX form of its gradient yet")
    axes = range(x.dim() - 2)
    dx = dweight = dbias = None
    if mask[0]:
        # What the strides leave over at the far end, where the convolution saw nothing.
        missing = [
            x.shape[2 + i]
            - (cotangent.shape[2 + i] - 1) * stride[i]
            + 2 * padding[i]
            - dilation[i] * (weight.shape[2 + i] - 1)
            - 1
            for i in axes
        ]
        dx = aten.convolution.default(
            cotangent, weight, None, stride, padding, dilation, True, [0 for _ in axes], groups
        )
        if any(s > 1 for s in stride):
            dx = torch.nn.functional.pad(dx, [n for m in reversed(missing) for n in (0, m)])
    if mask[1]:
        dweight = _convolution_dweight(cotangent, x, weight, stride, padding, dilation, groups)
    if mask[2]:
        dbias = cotangent.sum([0, *(2 + i for i in axes)])
    return dx, dweight, dbias


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


def _silu_backward(cotangent: Any, x: Any) -> Any:
    # σ(x)·(1 + x·(1 - σ(x)))
    one = op.CastLike(op.Constant(value_float=1.0), x)
    sigmoid = op.Sigmoid(x)
    slope = op.Mul(sigmoid, op.Add(one, op.Mul(x, op.Sub(one, sigmoid))))
    return op.Mul(cotangent, slope)
