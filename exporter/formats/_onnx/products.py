"""Products of matrices that ONNX or ONNX Runtime take for something else.

Of a size that may be 0, such as how many a mask selects: where it fuses transposes with a batch of
products, ONNX Runtime, up to 1.31 at least, writes only the first that is over none, and leaves
what was in its memory for the others; of matrices without rows or columns it divides by zero, which
ends the process.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import decompose

from fuseport.exporter.program.rewriting import Table
from fuseport.exporter.program.sizes.bounds import may_be_none

__all__ = ["OF_NONE", "WITH_VECTOR", "einsum"]

aten = torch.ops.aten


def _with_vector(x: Tensor, other: Tensor) -> Any:
    # ONNX Runtime, up to 1.31 at least, forgets a Transpose before a MatMul with a vector on the
    # right, and says nothing. A matrix of one column it multiplies as it should.
    if other.dim() != 1:
        return aten.matmul.default.decompose(x, other)
    if x.dim() == 1:
        return (x * other).sum()
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return aten.mm.default(rows, other.unsqueeze(1)).reshape(x.shape[:-1])


WITH_VECTOR: Table = {aten.mv.default: _with_vector, aten.matmul.default: _with_vector}


def einsum(equation: str, operands: Sequence[Tensor], path: Any = None) -> Any:
    """In terms of `bmm`, where a size is 1 and stands for another, or may be 0."""
    equation = equation.replace(" ", "")
    if "." in equation:
        return NotImplemented
    terms = zip(equation.split("->")[0].split(","), operands, strict=True)
    sizes = [pair for term, x in terms for pair in zip(term, x.shape, strict=True)]
    ones = {label for label, size in sizes if isinstance(size, int) and size == 1}
    others = {label for label, size in sizes if not isinstance(size, int) or size != 1}
    if not ones & others and not any(may_be_none(size) for _, size in sizes):
        return NotImplemented
    return aten.einsum.default.decompose(equation, operands)


def _bmm(left: Tensor, right: Tensor) -> Any:
    # Of matrices alone, `mm`, all is right.
    rows, terms, columns = (int(may_be_none(n)) for n in (*left.shape[1:], right.shape[2]))
    if not rows and not terms and not columns:
        return NotImplemented
    padded = F.pad(left, (0, terms, 0, rows)), F.pad(right, (0, columns, 0, terms))
    with decompose({}):  # of a size like `s0 - s0 // 2` bounds do not say that with 1 it is none
        product = aten.bmm.default(*padded)
    return product[:, : left.shape[1], : right.shape[2]]


def _baddbmm(x: Tensor, left: Tensor, right: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    if not any(map(may_be_none, (*left.shape[1:], right.shape[2]))):
        return NotImplemented
    return x * beta + aten.bmm.default(left, right) * alpha


def _matmul(left: Tensor, right: Tensor) -> Any:
    if max(left.dim(), right.dim()) < 3 or not any(map(may_be_none, (*left.shape, *right.shape))):
        return NotImplemented
    return aten.matmul.default.decompose(left, right)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    # Of rows alone, too.
    if x.dim() < 3 or not any(map(may_be_none, x.shape)):
        return NotImplemented
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return aten.linear.default(rows, weight, bias).reshape(*x.shape[:-1], weight.shape[0])


OF_NONE: Table = {
    aten.linear.default: _linear,
    aten.bmm.default: _bmm,
    aten.baddbmm.default: _baddbmm,
    aten.matmul.default: _matmul,
}
