"""Products, blocks, diagonals and covariances of matrices whose sizes are no numbers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["MATRICES"]


def _kron(input: Tensor, other: Tensor) -> Tensor:
    # Torch's takes sizes as numbers. Each dimension of one beside the same of the other, both
    # counted from the last, and of the two one.
    dims = max(input.dim(), other.dim())
    left, right = ([1] * (dims - x.dim()) + list(x.shape) for x in (input, other))
    beside = input.reshape([n for size in left for n in (size, 1)])
    product = beside * other.reshape([n for size in right for n in (1, size)])
    return product.reshape([a * b for a, b in zip(left, right, strict=True)])


def _chain_matmul(*matrices: Tensor) -> Any:
    return _multi_dot(matrices)


def _multi_dot(tensors: Sequence[Tensor]) -> Any:
    """Torch's looks for the cheapest order by sizes. Here the greatest inner one, of those of the
    example, goes first.
    """
    factors = list(tensors)
    if all(isinstance(n, int) for x in factors for n in x.shape):
        return NotImplemented
    while len(factors) > 1:
        inner = [_of_example(x.shape[-1]) for x in factors[:-1]]
        at = inner.index(max(inner))
        factors[at : at + 2] = [factors[at] @ factors[at + 1]]
    return factors[0]


def _of_example(size: Any) -> int:
    return size if isinstance(size, int) else size.node.hint or 0


def _block_diag(*tensors: Tensor) -> Any:
    """Of matrices, whose sizes torch takes as numbers."""
    matrices = [x.reshape(1, -1) if x.dim() < 2 else x for x in tensors]
    widths = [x.shape[1] for x in matrices]
    known = all(isinstance(size, int) for x in matrices for size in x.shape)
    if known or len({x.dtype for x in matrices}) > 1:
        return NotImplemented
    rows = [
        F.pad(x, (sum(widths[:number]), sum(widths[number + 1 :])))
        for number, x in enumerate(matrices)
    ]
    return torch.cat(rows)


def _fill_diagonal_(x: Tensor, fill_value: Any, wrap: bool = False) -> Any:
    """Of a matrix, whose sizes torch takes as numbers."""
    if wrap or x.dim() != 2:
        return NotImplemented
    rows, columns = (torch.arange(size, device=x.device) for size in x.shape)
    return x.masked_fill_(rows[:, None] == columns, fill_value)


def _cov(
    input: Tensor,
    *,
    correction: int = 1,
    fweights: Tensor | None = None,
    aweights: Tensor | None = None,
) -> Tensor:
    # Of rows. Torch's looks at the values of weights, and a capture at those of all.
    x = torch.atleast_2d(input)
    weights = fweights if aweights is None else aweights
    if fweights is not None and aweights is not None:
        weights = fweights * aweights
    if weights is None:
        count: Any = x.shape[1]
        centred = weighted = x - x.sum(1, keepdim=True) / count
        free: Any = torch.sym_max(count - correction, 0)
    else:
        count = weights.sum()
        lost = 1 if aweights is None else (weights * aweights).sum() / count
        centred = x - (x * weights).sum(1, keepdim=True) / count
        weighted = centred * weights
        free = (count - correction * lost).clamp(min=0)
    covariances: Tensor = centred @ weighted.mH / free
    return covariances.squeeze()


def _corrcoef(input: Tensor) -> Tensor:
    products = _cov(input)
    if not products.dim():
        return products / products
    deviations = products.diagonal().real.sqrt()
    c = products / deviations[:, None] / deviations
    if c.is_complex():
        return torch.complex(c.real.clamp(-1, 1), c.imag.clamp(-1, 1))
    return c.clamp(-1, 1)


MATRICES: Mapping[Any, Callable[..., Any]] = {
    **dict.fromkeys((torch.kron, Tensor.kron), _kron),
    **dict.fromkeys((torch.cov, Tensor.cov), _cov),
    **dict.fromkeys((torch.corrcoef, Tensor.corrcoef), _corrcoef),
    torch.block_diag: _block_diag,
    torch.chain_matmul: _chain_matmul,
    torch.linalg.multi_dot: _multi_dot,
    Tensor.fill_diagonal_: _fill_diagonal_,
}
"""What computes the same, or gives NotImplemented, where the function itself fixes nothing."""
