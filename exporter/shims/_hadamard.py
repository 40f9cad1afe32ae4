"""Hadamard transforms of rows, as the extension of Dao-AILab/fast-hadamard-transform has them.

A matrix of 2^k rows is a Kronecker product of smaller ones: a row is multiplied by each of these in
turn, along its own part of the row's index.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.exporter.shims._dtypes import wide

__all__ = ["MULTIPLES", "matrix", "transform"]

MULTIPLES = (12, 20, 28, 40)
"""Rows of matrices that are of no power of 2, and that the extension has beside these."""

_BITS = 6  # of the largest matrix that rows are multiplied by
_LEAST = 2  # the extension's kernels of `MULTIPLES` begin with four times as many


def transform(x: Tensor, scale: float | Tensor, multiple: int = 1) -> Tensor:
    """Rows times a Hadamard matrix and `scale`, computed in float32 at least and rounded once.

    Args:
        x: (…, n). Rows are filled up with zeros to `multiple` times a power of 2, at least 4 with
            a multiple, and n elements of the result stay.
        scale: a number.
        multiple: 1, or one of `MULTIPLES`: the matrix is of so many rows, ⊗ Sylvester's.

    Returns:
        Of the shape and dtype of x.
    """
    n = int(x.shape[-1])
    bits = (-(-n // multiple) - 1).bit_length() if n > multiple else 0
    bits = bits if multiple == 1 else max(bits, _LEAST)
    rows = F.pad(x.to(wide(x)), (0, (multiple << bits) - n))
    for factor in _factors(multiple, bits):
        signs = torch.tensor(matrix(factor), dtype=rows.dtype, device=rows.device)
        # What was in front comes to the end: after all factors, the order is what it was.
        rows = (rows.unflatten(-1, (factor, -1)).mT @ signs.mT).flatten(-2)
    return (rows[..., :n] * scale).to(x.dtype)


def matrix(n: int) -> list[list[int]]:
    """The Hadamard matrix of n rows: Sylvester's of a power of 2, or one of `MULTIPLES`.

    12 is by R. Paley's second construction over the field of 5 elements, 20 and 28 by J.
    Williamson's of four circulant matrices, 40 by doubling Paley's first over the field of 19.
    """
    if n in _CIRCULANTS:
        return _williamson(*_CIRCULANTS[n])
    if n == 12:
        return _added(_kronecker(_conference(5, 1), [[1, 1], [1, -1]]),
                      _kronecker(_identity(6), [[1, -1], [-1, -1]]))  # fmt: skip
    if n == 40:
        return _kronecker([[1, 1], [1, -1]], _added(_conference(19, -1), _identity(20)))
    signs = [[1]]
    while len(signs) < n:
        signs = _kronecker([[1, 1], [1, -1]], signs)
    return signs


_Signs = list[list[int]]

_CIRCULANTS = {
    20: ("+----", "+----", "++--+", "+-++-"),
    28: ("+------", "++----+", "+-+--+-", "+--++--"),
}
"""The first rows of Williamson's matrices."""


def _factors(multiple: int, bits: int) -> list[int]:
    """The sizes of matrices whose Kronecker product it is, of about as many bits each."""
    count = -(-bits // _BITS)
    parts = [bits // count + (i < bits % count) for i in range(count)]
    return [*([multiple] if multiple > 1 else []), *(1 << part for part in parts)]


def _williamson(*rows: str) -> _Signs:
    a, b, c, d = (_circulant([1 if sign == "+" else -1 for sign in row]) for row in rows)
    blocks = ((a, b, c, d), (_minus(b), a, _minus(d), c), (_minus(c), d, a, _minus(b)),
              (_minus(d), _minus(c), b, a))  # fmt: skip
    return [[x for block in row for x in block[i]] for row in blocks for i in range(len(a))]


def _conference(q: int, top: int) -> _Signs:
    """Whether i - j is a square in the field of q, (q + 1, q + 1), below a row of `top`."""
    squares = {i * i % q for i in range(1, q)}
    character = [0, *(1 if i in squares else -1 for i in range(1, q))]
    core = [[1, *(character[(i - j) % q] for j in range(q))] for i in range(q)]
    return [[0, *[top] * q], *core]


def _circulant(row: Sequence[int]) -> _Signs:
    return [[row[(j - i) % len(row)] for j in range(len(row))] for i in range(len(row))]


def _identity(n: int) -> _Signs:
    return [[int(i == j) for j in range(n)] for i in range(n)]


def _kronecker(a: _Signs, b: _Signs) -> _Signs:
    return [[x * y for x in one for y in other] for one in a for other in b]


def _added(a: _Signs, b: _Signs) -> _Signs:
    return [[x + y for x, y in zip(*rows, strict=True)] for rows in zip(a, b, strict=True)]


def _minus(a: _Signs) -> _Signs:
    return [[-x for x in row] for row in a]
