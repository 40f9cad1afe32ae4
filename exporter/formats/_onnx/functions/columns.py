"""Loops over the columns of matrices, as nodes of ONNX that have a function body.

A node stands for the whole loop, of a size that may be dynamic; the bodies are made of standard
operators, and know nothing of dtypes. Matrices come in one dimension of batches.
"""

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fuseport.ops.onnx_bodies import parsed

if TYPE_CHECKING:
    from onnx import FunctionProto

__all__ = [
    "DOMAIN",
    "VERSION",
    "cholesky",
    "eliminated",
    "functions",
    "reflected",
    "reflectors",
    "substituted",
    "swapped",
]

DOMAIN = "fuseport.columns"
VERSION = 1


def eliminated(a: Tensor, steps: Any) -> tuple[Tensor, Tensor]:
    """Gaussian elimination with partial pivoting, of `steps`, the smaller of n and m, columns.

    Args:
        a: (b, n, m). Of what stands beside n columns becomes what L⁻¹P makes of it.

    Returns:
        (b, n, m), L below the diagonal and U; and the row that each was changed for, (b, steps).
    """
    factors, pivots = _node(
        "eliminated", [a], [(a.dtype, a.shape), (torch.int64, [a.shape[0], steps])]
    )
    return factors, pivots


def swapped(pivots: Tensor, rows: Any) -> Tensor:
    """The permutation (b, rows) of changes of rows (b, k), one after another."""
    like = torch.arange(rows, device=pivots.device)
    (found,) = _node("swapped", [pivots, like], [(torch.int64, [pivots.shape[0], rows])])
    return found


def substituted(lower: Tensor, b: Tensor) -> Tensor:
    """The x of `lower @ x = b`: lower (b, n, n), with zeros above its diagonal, and b (b, n, m)."""
    (found,) = _node("substituted", [lower, b], [(b.dtype, b.shape)])
    return found


def cholesky(a: Tensor) -> Tensor:
    """L of LLᵀ, by the lower triangle of (b, n, n); NaN from the column on that has no root."""
    (found,) = _node("cholesky", [a], [(a.dtype, a.shape)])
    return found


def reflectors(a: Tensor, steps: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Householder's, which make R of (b, n, m), by `steps`, the smaller of both, as LAPACK's do.

    Returns:
        (b, n, m), of which the upper triangle is R; the vectors (b, n, steps); factors (b, steps).
    """
    b, n, _ = a.shape
    shapes = [(a.dtype, shape) for shape in (a.shape, [b, n, steps], [b, steps])]
    upper, vectors, factors = _node("reflectors", [a], shapes)
    return upper, vectors, factors


def reflected(vectors: Tensor, factors: Tensor, x: Tensor) -> Tensor:
    """What the reflections by (b, n, k), with (b, k), make of (b, n, m), the last of them first."""
    (found,) = _node("reflected", [vectors, factors, x], [(x.dtype, x.shape)])
    return found


@cache
def functions(opset: int) -> Sequence["FunctionProto"]:
    """The bodies of all nodes, in standard operators of `opset`, 18 or later."""
    return parsed([f"{text}}}" for text in _TEXTS], opset, DOMAIN)


def _node(
    name: str, inputs: Sequence[Tensor], results: Sequence[tuple[torch.dtype, Any]]
) -> Sequence[Tensor]:
    return torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::{name}",
        inputs,
        dtypes=[dtype for dtype, _ in results],
        shapes=[shape for _, shape in results],
        version=VERSION,
    )


# In the texts: `rows` (n, 1) and `columns` (m) have the number of each; k is a column's, `at` in a
# tensor of one; names that end in _k are of that column or row alone. What all turns of a loop give
# is reshaped, since onnx's reference evaluator does not stack it, but puts one behind the other.

_SIZES = """
    n = Shape <start = 1, end = 2> (a)
    m = Shape <start = 2, end = 3> (a)
    unit = Constant <value_ints = [1]> ()
    first_axis = Constant <value_ints = [0]> ()
    first = Constant <value_int = 0> ()
    one_more = Constant <value_int = 1> ()
    to_n = Squeeze(n)
    to_m = Squeeze(m)
    row_numbers = Range(first, to_n, one_more)
    rows = Unsqueeze(row_numbers, unit)
    columns = Range(first, to_m, one_more)
    zero_float = Constant <value_float = 0.0> ()
    zero = CastLike(zero_float, a)
    one_float = Constant <value_float = 1.0> ()
    one = CastLike(one_float, a)
    always = Equal(first, first)
"""

_BEGIN = """
            goes_on = Identity(going)
            axis_0 = Constant <value_ints = [0]> ()
            at = Unsqueeze(k, axis_0)
"""

_FROM_ZEROS = (
    _SIZES
    + """
    shape = Shape(a)
    zeros = Expand(zero, shape)
    found = Loop <
        body = step (int64 k, bool going, x) => (goes_on, x_next) {"""
    + _BEGIN
)

_ELIMINATED = (
    """eliminated (a) => (factors, pivots) {"""
    + _SIZES
    + """
    none_float = Constant <value_float = -1.0> ()
    none = CastLike(none_float, a)
    most_float = Div(one_float, zero_float)
    most = CastLike(most_float, a)
    steps = Min(to_n, to_m)
    rest, done, changes = Loop <
        body = step (int64 k, bool going, x) => (goes_on, x_next, pivot_row, pivot) {"""
    + _BEGIN
    + """
            column_k = Gather <axis = 2> (x, at)
            open = GreaterOrEqual(rows, k)
            sizes_k = Abs(column_k)
            unknown_k = IsNaN(column_k)
            known_k = Where(unknown_k, most, sizes_k)
            open_k = Where(open, known_k, none)
            pivot = ArgMax <axis = 1, keepdims = 1> (open_k)
            pivot_row = GatherND <batch_dims = 1> (x, pivot)
            row_k = Gather <axis = 1> (x, at)
            is_pivot = Equal(rows, pivot)
            x_swapped = Where(is_pivot, row_k, x)
            pivot_k = Gather <axis = 2> (pivot_row, at)
            lacks = Equal(pivot_k, zero)
            divisor = Where(lacks, one, pivot_k)
            swapped_k = Gather <axis = 2> (x_swapped, at)
            factors_k = Div(swapped_k, divisor)
            below = Greater(rows, k)
            lower_k = Where(below, factors_k, zero)
            behind = Greater(columns, k)
            upper_k = Where(behind, pivot_row, zero)
            product = Mul(lower_k, upper_k)
            less = Sub(x_swapped, product)
            here = Equal(columns, k)
            x_next = Where(here, lower_k, less)
        }> (steps, always, a)
    batch = Shape <start = 0, end = 1> (a)
    many = Unsqueeze(steps, first_axis)
    rows_shape = Concat <axis = 0> (many, batch, m)
    done_rows = Reshape <allowzero = 1> (done, rows_shape)
    upper = Transpose <perm = [1, 0, 2]> (done_rows)
    others = Slice(rest, many, n, unit)
    factors = Concat <axis = 1> (upper, others)
    changes_shape = Concat <axis = 0> (many, batch)
    changed = Reshape <allowzero = 1> (changes, changes_shape)
    pivots = Transpose <perm = [1, 0]> (changed)
"""
)

_SWAPPED = (
    """swapped (pivots, order) => (permutation) {
    first_axis = Constant <value_ints = [0]> ()
    first = Constant <value_int = 0> ()
    always = Equal(first, first)
    count = Shape <start = 1, end = 2> (pivots)
    steps = Squeeze(count)
    batch = Shape <start = 0, end = 1> (pivots)
    n = Shape(order)
    shape = Concat <axis = 0> (batch, n)
    all = Expand(order, shape)
    permutation = Loop <
        body = step (int64 k, bool going, p) => (goes_on, p_next) {"""
    + _BEGIN
    + """
            pivot = Gather <axis = 1> (pivots, at)
            p_pivot = GatherElements <axis = 1> (p, pivot)
            p_k = Gather <axis = 1> (p, at)
            is_pivot = Equal(order, pivot)
            swapped_once = Where(is_pivot, p_k, p)
            is_k = Equal(order, k)
            p_next = Where(is_k, p_pivot, swapped_once)
        }> (steps, always, all)
"""
)

_SUBSTITUTED = (
    """substituted (lower, a) => (found) {"""
    + _FROM_ZEROS
    + """
            lower_k = Gather <axis = 1> (lower, at)
            diagonal_k = Gather <axis = 2> (lower_k, at)
            a_k = Gather <axis = 1> (a, at)
            known = MatMul(lower_k, x)
            left_k = Sub(a_k, known)
            x_k = Div(left_k, diagonal_k)
            here = Equal(rows, k)
            x_next = Where(here, x_k, x)
        }> (to_n, always, zeros)
"""
)

_CHOLESKY = (
    """cholesky (a) => (found) {"""
    + _FROM_ZEROS
    + """
            column_k = Gather <axis = 2> (a, at)
            row_k = Gather <axis = 1> (x, at)
            turned_k = Transpose <perm = [0, 2, 1]> (row_k)
            known = MatMul(x, turned_k)
            left_k = Sub(column_k, known)
            square_k = Gather <axis = 1> (left_k, at)
            root_k = Sqrt(square_k)
            ratio_k = Div(left_k, root_k)
            below = Greater(rows, k)
            below_k = Where(below, ratio_k, zero)
            on = Equal(rows, k)
            lower_k = Where(on, root_k, below_k)
            here = Equal(columns, k)
            x_next = Where(here, lower_k, x)
        }> (to_n, always, zeros)
"""
)

_REFLECTORS = (
    """reflectors (a) => (upper, vectors, factors) {"""
    + _SIZES
    + """
    steps = Min(to_n, to_m)
    upper, all_vectors, all_factors = Loop <
        body = step (int64 k, bool going, x) => (goes_on, x_next, vector_k, factor_k) {"""
    + _BEGIN
    + """
            axis_1 = Constant <value_ints = [1]> ()
            column_k = Gather <axis = 2> (x, at)
            top_k = Gather <axis = 1> (column_k, at)
            below = Greater(rows, k)
            below_k = Where(below, column_k, zero)
            squares = ReduceSumSquare(below_k, axis_1)
            top_square = Mul(top_k, top_k)
            all_squares = Add(top_square, squares)
            length = Sqrt(all_squares)
            minus_length = Neg(length)
            negative = Less(top_k, zero)
            result_k = Where(negative, length, minus_length)
            nothing = Equal(squares, zero)
            divisor_k = Where(nothing, one, result_k)
            off_k = Sub(result_k, top_k)
            share_k = Div(off_k, divisor_k)
            factor_k = Where(nothing, zero, share_k)
            back_k = Neg(off_k)
            scale_k = Where(nothing, one, back_k)
            scaled_k = Div(below_k, scale_k)
            on = Equal(rows, k)
            vector_k = Where(on, one, scaled_k)
            turned_k = Transpose <perm = [0, 2, 1]> (vector_k)
            along = MatMul(turned_k, x)
            weighted = Mul(factor_k, vector_k)
            change = Mul(weighted, along)
            x_next = Sub(x, change)
        }> (steps, always, a)
    batch = Shape <start = 0, end = 1> (a)
    many = Unsqueeze(steps, first_axis)
    vectors_shape = Concat <axis = 0> (many, batch, n)
    vector_rows = Reshape <allowzero = 1> (all_vectors, vectors_shape)
    vectors = Transpose <perm = [1, 2, 0]> (vector_rows)
    factors_shape = Concat <axis = 0> (many, batch)
    factor_rows = Reshape <allowzero = 1> (all_factors, factors_shape)
    factors = Transpose <perm = [1, 0]> (factor_rows)
"""
)

_REFLECTED = """reflected (vectors, factors, a) => (found) {
    first = Constant <value_int = 0> ()
    always = Equal(first, first)
    count = Shape <start = 2, end = 3> (vectors)
    steps = Squeeze(count)
    column = Constant <value_ints = [2]> ()
    weights = Unsqueeze(factors, column)
    found = Loop <
        body = step (int64 k, bool going, x) => (goes_on, x_next) {
            goes_on = Identity(going)
            axis_0 = Constant <value_ints = [0]> ()
            one_k = Constant <value_ints = [1]> ()
            before = Add(k, one_k)
            at = Sub(count, before)
            vector_k = Gather <axis = 2> (vectors, at)
            factor_k = Gather <axis = 1> (weights, at)
            turned_k = Transpose <perm = [0, 2, 1]> (vector_k)
            along = MatMul(turned_k, x)
            weighted = Mul(factor_k, vector_k)
            change = Mul(weighted, along)
            x_next = Sub(x, change)
        }> (steps, always, a)
"""

_TEXTS = (_ELIMINATED, _SWAPPED, _SUBSTITUTED, _CHOLESKY, _REFLECTORS, _REFLECTED)
