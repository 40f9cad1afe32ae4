"""Factorisations of matrices, and what is computed by them, which ONNX has not.

All in float64: of float32, that is no less right than LAPACK's whatever the order of its sums.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fuseport.exporter.formats._onnx.functions import columns
from fuseport.exporter.program.rewriting import Table
from fuseport.exporter.program.sizes.bounds import may_be_none

__all__ = ["FACTORISATIONS"]

aten = torch.ops.aten


def _matrices(x: Tensor) -> Tensor:
    """(…, n, m) as (b, n, m) in float64."""
    return x.to(torch.float64).reshape(math.prod(x.shape[:-2]), *x.shape[-2:])


def _as_given(found: Tensor, x: Tensor, shape: Sequence[Any] | None = None) -> Tensor:
    """(b, n, m) in the dtype of `x`, and its batch; of another shape behind that than (n, m)."""
    behind = found.shape[1:] if shape is None else shape
    return found.reshape([*x.shape[:-2], *behind]).to(x.dtype)


def _smaller(n: Any, m: Any) -> Any:
    if statically_known_true(n <= m):
        return n
    return m if statically_known_true(m <= n) else torch.sym_min(n, m)


def _numbers(size: Any, like: Tensor) -> Tensor:
    return torch.arange(size, device=like.device)


def _one(n: Any, m: Any, like: Tensor) -> Tensor:
    """The first m columns of the matrix of 1 (n, n), of as many batches as `like` has."""
    one = (_numbers(n, like)[:, None] == _numbers(m, like)).to(like.dtype)
    return one.expand(like.shape[0], n, m)


def _eliminated(a: Tensor) -> tuple[Tensor, Tensor]:
    return columns.eliminated(a, _smaller(*a.shape[1:]))


def _substituted(a: Tensor, b: Tensor, *, upper: bool, unit: bool = False) -> Tensor:
    """The x of `a @ x = b`, of a triangle of `a` alone; (b, n, n) and (b, n, m)."""
    a = a.triu() if upper else a.tril()
    if unit:
        a = torch.where(_one(a.shape[1], a.shape[1], a) > 0, 1, a)
    if not upper:
        return columns.substituted(a, b)
    return columns.substituted(a.flip(1, 2), b.flip(1)).flip(1)


def _taken(x: Tensor, rows: Tensor) -> Tensor:
    """Rows of (b, n, m), by (b, n)."""
    return x.gather(1, rows[:, :, None].expand(x.shape))


def _solved(lu: Tensor, pivots: Tensor, b: Tensor, *, turned: bool) -> Tensor:
    """The x of `a @ x = b`, or of `aᵀ`, by LU of `a` and the rows that were changed, from 0 on."""
    order = columns.swapped(pivots, lu.shape[1])
    if not turned:
        halfway = _substituted(lu, _taken(b, order), upper=False, unit=True)
        return _substituted(lu, halfway, upper=True)
    halfway = _substituted(lu.mT, b, upper=False)
    x = _substituted(lu.mT, halfway, upper=True, unit=True)
    numbers = _numbers(lu.shape[1], lu).expand(order.shape)
    return _taken(x, torch.zeros_like(order).scatter(1, order, numbers))


def _info(failed: Tensor, x: Tensor) -> Tensor:
    """The first of the columns (b, n) that has failed, from 1 on; 0 of none."""
    number = torch.where(failed, _numbers(failed.shape[1], failed), failed.shape[1])
    first = torch.cat([number, number.new_full([number.shape[0], 1], failed.shape[1])], 1).amin(1)
    found = torch.where(first < failed.shape[1], first + 1, 0)
    return found.reshape(x.shape[:-2]).to(torch.int32)


def _lu_factor_ex(
    a: Tensor, *, pivot: bool = True, check_errors: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    lu, pivots = _eliminated(_matrices(a))
    factors, rows = _with_factors(a, lu, pivots)
    return factors, rows, _info(_diagonal(lu) == 0, a)


def _diagonal(x: Tensor) -> Tensor:
    return x.diagonal(0, 1, 2)


def _lu(a: Tensor, *, pivot: bool = True) -> tuple[Tensor, ...]:
    lu, pivots = _eliminated(_matrices(a))
    return _parts(lu, pivots, a)


def _parts(lu: Tensor, pivots: Tensor, like: Tensor) -> tuple[Tensor, ...]:
    n, m = lu.shape[1:]
    steps = _smaller(n, m)
    lower = lu[:, :, :steps].tril(-1) + _one(n, steps, lu)
    order = columns.swapped(pivots, n)
    permutation = (_numbers(n, lu)[:, None] == order[:, None, :]).to(lu.dtype)
    results = permutation, lower, lu[:, :steps].triu()
    return tuple(_as_given(each, like) for each in results)


def _lu_unpack(
    lu: Tensor, pivots: Tensor, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[Tensor, ...]:
    none = lu.new_zeros(0)
    permutation, *factors = _parts(_matrices(lu), _from_zero(pivots), lu)
    return (permutation if unpack_pivots else none), *(factors if unpack_data else (none, none))


def _from_zero(pivots: Tensor) -> Tensor:
    rows = pivots.to(torch.int64) - 1
    return rows.reshape(math.prod(pivots.shape[:-1]), pivots.shape[-1])


def _lu_solve(
    lu: Tensor, pivots: Tensor, b: Tensor, *, left: bool = True, adjoint: bool = False
) -> Tensor:
    if not left:
        return _lu_solve(lu, pivots, b.mT, adjoint=not adjoint).mT
    batch = _batch(lu, b)
    rows = pivots.expand([*batch, pivots.shape[-1]])
    lu, b = (x.expand([*batch, *x.shape[-2:]]) for x in (lu, b))
    x = _solved(_matrices(lu), _from_zero(rows), _matrices(b), turned=adjoint)
    return _as_given(x, b)


def _batch(a: Tensor, b: Tensor) -> Any:
    return torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])


def _solve_with_factors(
    a: Tensor, b: Tensor, *, left: bool = True, check_errors: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lu, pivots, info = _lu_factor_ex(a)
    of_vector = _is_vector(a, b)
    x = _lu_solve(lu, pivots, b.unsqueeze(-1) if of_vector else b, left=left)
    return (x.squeeze(-1) if of_vector else x), lu, pivots, info


def _is_vector(a: Tensor, b: Tensor) -> bool:
    if b.dim() == 1:
        return True
    shapes = zip(b.shape, a.shape[:-1], strict=False)
    return b.dim() == a.dim() - 1 and all(statically_known_true(n == m) for n, m in shapes)


def _solve_ex(
    a: Tensor, b: Tensor, *, left: bool = True, check_errors: bool = False
) -> tuple[Tensor, Tensor]:
    if _is_vector(a, b):
        x, info = _solve_ex(a, b.unsqueeze(-1))
        return x.squeeze(-1), info
    if not left:
        x, info = _solve_ex(a.mT, b.mT)
        return x.mT, info
    pairs = zip(a.shape[:-2], b.shape[:-2], strict=False)
    if a.dim() != b.dim() or not all(statically_known_true(n == m) for n, m in pairs):
        x, _, _, info = _solve_with_factors(a, b)  # LU of what is broadcast once
        return x, info
    x, lu = _solved_at_once(_matrices(a), _matrices(b))
    return _as_given(x, b), _info(_diagonal(lu) == 0, a)


def _solved_at_once(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The x of `a @ x = b`, and LU. What eliminates in `a` does in `b` beside it, too."""
    n = a.shape[2]
    both, _ = columns.eliminated(torch.cat([a, b], 2), n)
    return _substituted(both[:, :, :n], both[:, :, n:], upper=True), both[:, :, :n]


def _inv_ex(a: Tensor, *, check_errors: bool = False) -> tuple[Tensor, Tensor]:
    matrices = _matrices(a)
    inverse, lu = _solved_at_once(matrices, _one(a.shape[-1], a.shape[-1], matrices))
    return _as_given(inverse, a), _info(_diagonal(lu) == 0, a)


def _sign(lu: Tensor, pivots: Tensor) -> Tensor:
    """That of the product of U's diagonal, for each change of rows the opposite."""
    diagonal = _diagonal(lu)
    changed = pivots != _numbers(pivots.shape[1], pivots)
    odd = ((diagonal < 0) ^ changed).to(torch.int64).sum(1) % 2
    is_some = ((diagonal < 0) | (diagonal > 0)).all(1)
    return torch.where(is_some, 1 - 2 * odd, 0).to(lu.dtype)


def _product(x: Tensor) -> Tensor:
    """Of the second dimension; that of nothing is 0 in ONNX Runtime, 1.31 at least."""
    if may_be_none(x.shape[1]):
        x = torch.cat([x, x.new_ones([x.shape[0], 1])], 1)
    return x.prod(1)


def _det(a: Tensor) -> tuple[Tensor, ...]:
    lu, pivots = _eliminated(_matrices(a))
    det = _sign(lu, pivots) * _product(_diagonal(lu).abs())
    return _with_factors(a, lu, pivots, det)


def _slogdet(a: Tensor) -> tuple[Tensor, ...]:
    lu, pivots = _eliminated(_matrices(a))
    logarithm = _diagonal(lu).abs().log().sum(1)
    return _with_factors(a, lu, pivots, _sign(lu, pivots), logarithm)


def _logdet(a: Tensor) -> Tensor:
    sign, logarithm, _, _ = _slogdet(a)
    return torch.where(sign < 0, math.nan, logarithm)


def _with_factors(a: Tensor, lu: Tensor, pivots: Tensor, *numbers: Tensor) -> tuple[Tensor, ...]:
    found = _as_given(pivots + 1, a, pivots.shape[1:]).to(torch.int32)
    return *(_as_given(each, a, ()) for each in numbers), _as_given(lu, a), found


def _cholesky_ex(
    a: Tensor, *, upper: bool = False, check_errors: bool = False
) -> tuple[Tensor, Tensor]:
    matrices = _matrices(a)
    lower = columns.cholesky(matrices.mT if upper else matrices)
    info = _info(~(_diagonal(lower) > 0), a)
    return _as_given(lower.mT if upper else lower, a), info


def _cholesky(a: Tensor, upper: bool = False) -> Tensor:
    return _cholesky_ex(a, upper=upper)[0]


def _cholesky_solve(b: Tensor, factor: Tensor, upper: bool = False) -> Tensor:
    lower = factor.mT if upper else factor
    halfway = _solve_triangular(lower.to(torch.float64), b.to(torch.float64), upper=False)
    return _solve_triangular(lower.mT.to(torch.float64), halfway, upper=True).to(b.dtype)


def _cholesky_inverse(factor: Tensor, upper: bool = False) -> Tensor:
    n = factor.shape[-1]
    one = _as_given(_one(n, n, _matrices(factor)), factor)
    return _cholesky_solve(one, factor, upper)


def _solve_triangular(
    a: Tensor, b: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Tensor:
    if not left:
        turned = _solve_triangular(a.mT, b.mT, upper=not upper, unitriangular=unitriangular)
        return turned.mT
    batch = _batch(a, b)
    a, b = (x.expand([*batch, *x.shape[-2:]]) for x in (a, b))
    x = _substituted(_matrices(a), _matrices(b), upper=upper, unit=unitriangular)
    return _as_given(x, b)


def _triangular_solve(
    b: Tensor,
    a: Tensor,
    upper: bool = True,
    transpose: bool = False,
    unitriangular: bool = False,
) -> tuple[Tensor, Tensor]:
    taken = a.mT if transpose else a
    x = _solve_triangular(taken, b, upper=upper != transpose, unitriangular=unitriangular)
    return x, a.expand([*_batch(a, b), *a.shape[-2:]]).clone()


def _qr(a: Tensor, mode: str = "reduced") -> tuple[Tensor, Tensor]:
    n, m = a.shape[-2:]
    steps = _smaller(n, m)
    upper, vectors, factors = columns.reflectors(_matrices(a), steps)
    rows = n if mode == "complete" else steps
    r = _as_given(upper[:, :rows].triu(), a)
    if mode == "r":
        return a.new_zeros(0), r
    return _as_given(columns.reflected(vectors, factors, _one(n, rows, upper)), a), r


def _householder_product(a: Tensor, factors: Tensor) -> Tensor:
    matrices = _matrices(a)
    n, count = a.shape[-2], factors.shape[-1]
    vectors = matrices[:, :, :count].tril(-1) + _one(n, count, matrices)
    weights = factors.to(torch.float64).reshape(matrices.shape[0], count)
    return _as_given(columns.reflected(vectors, weights, _one(n, a.shape[-1], matrices)), a)


# Not in torch 2.14.
_OLD: Table = {aten.cholesky.default: _cholesky} if hasattr(aten, "cholesky") else {}
FACTORISATIONS: Table = {
    aten._linalg_check_errors.default: lambda *_, **__: None,
    aten._linalg_det.default: _det,
    aten._linalg_slogdet.default: _slogdet,
    aten._linalg_solve_ex.default: _solve_with_factors,
    aten.cholesky_inverse.default: _cholesky_inverse,
    aten.cholesky_solve.default: _cholesky_solve,
    aten.det.default: lambda a: _det(a)[0],
    aten.linalg_cholesky_ex.default: _cholesky_ex,
    aten.linalg_det.default: lambda a: _det(a)[0],
    aten.linalg_householder_product.default: _householder_product,
    aten.linalg_inv_ex.default: _inv_ex,
    aten.linalg_lu.default: _lu,
    aten.linalg_lu_factor_ex.default: _lu_factor_ex,
    aten.linalg_lu_solve.default: _lu_solve,
    aten.linalg_qr.default: _qr,
    aten.logdet.default: _logdet,
    aten.linalg_slogdet.default: lambda a: _slogdet(a)[:2],
    aten.linalg_solve_ex.default: _solve_ex,
    aten.linalg_solve_triangular.default: _solve_triangular,
    aten.lu_unpack.default: _lu_unpack,
    aten.triangular_solve.default: _triangular_solve,
    **_OLD,
}
