"""Operators of complex numbers by their real and imaginary parts, as values of their own."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

__all__ = ["FORMS", "Complex", "as_it_is", "constant_pad", "is_complex", "parts_of", "whole"]

aten = torch.ops.aten

_MOST = 16  # a whole power up to which is had by multiplication


class Complex:
    """A complex tensor.

    Attributes:
        re: its real part.
        im: its imaginary part, of the same shape and dtype.
    """

    def __init__(self, re: Tensor, im: Tensor) -> None:
        """Take the parts."""
        self.re, self.im = re, im


pytree.register_pytree_node(
    Complex, lambda z: ([z.re, z.im], None), lambda parts, _: Complex(*parts)
)


def is_complex(x: Any) -> bool:
    """Whether it is a complex number, or a tensor of such, by parts or as it is."""
    return isinstance(x, Complex | complex) or (isinstance(x, Tensor) and x.is_complex())


def parts_of(x: Any) -> tuple[Any, Any]:
    """Real and imaginary part of a tensor or number; the latter is None of a real one."""
    if isinstance(x, Complex):
        return x.re, x.im
    if isinstance(x, complex):
        return x.real, x.imag
    if isinstance(x, Tensor) and x.is_complex():
        both = torch.view_as_real(x)
        return both.select(-1, 0), both.select(-1, 1)
    return x, None


def whole(x: Any) -> Complex:
    """A tensor in parts; of a real one, the imaginary part is zeros."""
    re, im = parts_of(x)
    return Complex(re, torch.zeros_like(re) if im is None else im)


def _side_by_side(z: Complex) -> Tensor:
    return torch.stack([z.re, z.im], -1)


def as_it_is(op: Any) -> Callable[..., Any]:
    """An operator that takes complex numbers as they are."""

    def joined(x: Any) -> Any:
        return torch.complex(x.re, x.im) if isinstance(x, Complex) else x

    def parted(x: Any) -> Any:
        return Complex(*parts_of(x)) if is_complex(x) else x

    def apply(*args: Any, **kwargs: Any) -> Any:
        given, named = pytree.tree_map(joined, (args, kwargs), is_leaf=is_complex)
        return pytree.tree_map(parted, op(*given, **named))

    return apply


# Operators that move, drop or add up elements, whatever these are.


def _of_each(op: OpOverload) -> Callable[..., Any]:
    def apply(*args: Any, **kwargs: Any) -> Any:
        flat, spec = pytree.tree_flatten((args, kwargs), is_leaf=is_complex)
        both = []
        for part in (0, 1):
            given = [_part(x, part) for x in flat]
            mine, named = pytree.tree_unflatten(given, spec)
            both.append(op(*mine, **named))
        re, im = both
        if isinstance(re, Tensor):
            return Complex(re, im)
        return tuple(Complex(*pair) for pair in zip(re, im, strict=True))

    return apply


def _part(x: Any, part: int) -> Any:
    if is_complex(x):
        return parts_of(x)[part]
    if part == 1 and isinstance(x, Tensor) and x.is_floating_point():
        return torch.zeros_like(x)
    return x


def _where(condition: Tensor, x: Any, y: Any) -> Complex:
    a, b = whole(x), whole(y)
    return Complex(torch.where(condition, a.re, b.re), torch.where(condition, a.im, b.im))


def _masked_fill(x: Complex, mask: Tensor, value: Any) -> Complex:
    (a, b), (c, d) = parts_of(x), parts_of(value)
    return Complex(a.masked_fill(mask, c), b.masked_fill(mask, 0.0 if d is None else d))


def constant_pad(x: Complex, widths: Sequence[int], value: Any = 0) -> Complex:
    """Complex numbers with others around them, as `torch.nn.functional.pad` has it."""
    (a, b), (c, d) = parts_of(x), parts_of(value)
    pad = aten.constant_pad_nd.default
    return Complex(pad(a, widths, c), pad(b, widths, d or 0.0))


def _filled(op: OpOverload) -> Callable[..., Any]:
    """Operators that make tensors which are the same everywhere."""

    def apply(*args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        numbers = [x.imag for x in args if isinstance(x, complex)]
        real = [parts_of(x)[0] for x in args]
        if dtype is not None:
            kwargs["dtype"] = dtype.to_real()
        re = op(*real, **kwargs)
        if dtype is not None and not dtype.is_complex:
            return re
        return Complex(re, torch.full_like(re, numbers[0]) if numbers else torch.zeros_like(re))

    return apply


def _to_copy(x: Any, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    re, im = parts_of(x)
    real = {} if dtype is None else {"dtype": dtype.to_real()}
    re = aten._to_copy(re, **real, **kwargs)
    if dtype is not None and not dtype.is_complex:
        return re
    return Complex(re, torch.zeros_like(re) if im is None else aten._to_copy(im, **real, **kwargs))


# Arithmetic.


def _add(x: Any, y: Any, *, alpha: Any = 1) -> Complex:
    (a, b), (c, d) = parts_of(x), parts_of(_mul(y, alpha) if alpha != 1 else y)
    re = a + c
    if b is None or d is None:
        return Complex(re, _like(d if b is None else b, re))
    return Complex(re, b + d)


def _like(part: Any, like: Tensor) -> Tensor:
    """The part that has no other to be added to, in the shape that the sum has."""
    if not isinstance(part, Tensor):
        return torch.full_like(like, part)
    return part.to(like.dtype).expand(like.shape)


def _mul(x: Any, y: Any) -> Any:
    (a, b), (c, d) = parts_of(x), parts_of(y)
    if b is None and d is None:
        return a * c
    if b is None:
        return Complex(a * c, a * d)
    if d is None:
        return Complex(a * c, b * c)
    return Complex(a * c - b * d, a * d + b * c)


def _product(op: OpOverload) -> Callable[[Any, Any], Complex]:
    """Products of matrices."""

    def apply(x: Any, y: Any) -> Complex:
        (a, b), (c, d) = parts_of(x), parts_of(y)
        if b is None:
            return Complex(op(a, c), op(a, d))
        if d is None:
            return Complex(op(a, c), op(b, c))
        return Complex(op(a, c) - op(b, d), op(a, d) + op(b, c))

    return apply


def _with_product(op: OpOverload) -> Callable[..., Complex]:
    def apply(bias: Any, x: Any, y: Any, *, beta: Any = 1, alpha: Any = 1) -> Complex:
        return _add(_mul(_product(op)(x, y), alpha), _mul(bias, beta))

    return apply


def _div(x: Any, y: Any) -> Complex:
    (a, b), (c, d) = parts_of(x), parts_of(y)
    if d is None:
        return Complex(a / c, b / c)
    if isinstance(y, complex):
        product: Complex = _mul(x, 1 / y)
        return product
    # By the larger part first, so that squares do not overflow.
    scale = torch.maximum(c.abs(), d.abs())
    c, d = c / scale, d / scale
    norm = (c * c + d * d) * scale
    if b is None:
        return Complex(a * c / norm, -a * d / norm)
    return Complex((a * c + b * d) / norm, (b * c - a * d) / norm)


def _abs(x: Any) -> Tensor:
    re, im = parts_of(x)
    scale = torch.maximum(re.abs(), im.abs())
    divisor = scale.masked_fill(scale == 0, 1.0)
    re, im = re / divisor, im / divisor
    size: Tensor = scale * torch.sqrt(re * re + im * im)
    return size


def _sgn(x: Any) -> Complex:
    re, im = parts_of(x)
    size = _abs(x)
    divisor = size.masked_fill(size == 0, 1.0)
    return Complex(re / divisor, im / divisor)


def _angle(x: Any) -> Tensor:
    re, im = parts_of(x)
    return torch.atan2(im, re)


def _polar(size: Tensor, angle: Tensor) -> Complex:
    return Complex(size * torch.cos(angle), size * torch.sin(angle))


def _exp(x: Any) -> Complex:
    re, im = parts_of(x)
    return _polar(torch.exp(re), im)


def _log(x: Any) -> Complex:
    return Complex(torch.log(_abs(x)), _angle(x))


def _sqrt(x: Any) -> Complex:
    # The larger part first, which is a sum of what has one sign.
    re, im = parts_of(x)
    large = torch.sqrt((_abs(x) + re.abs()) / 2)
    small = im / (2 * large.masked_fill(large == 0, 1.0))
    turned = torch.where(im < 0, -large, large)
    left = re < 0
    return Complex(torch.where(left, small.abs(), large), torch.where(left, turned, small))


def _power(x: Any, exponent: Any) -> Complex:
    if isinstance(exponent, int | float) and exponent in range(-_MOST, _MOST + 1):
        return _whole_power(x, int(exponent))
    if isinstance(x, int | float) and x > 0:
        return _exp(_mul(exponent, math.log(x)))
    base, positive = whole(x), parts_of(exponent)[0] > 0
    power: Complex = _exp(_mul(_log(base), exponent))
    zero = (base.re == 0) & (base.im == 0) & positive
    return Complex(power.re.masked_fill(zero, 0.0), power.im.masked_fill(zero, 0.0))


def _whole_power(x: Any, exponent: int) -> Complex:
    if exponent < 0:
        return _div(1.0, _whole_power(x, -exponent))
    if exponent == 0:
        return whole(torch.ones_like(parts_of(x)[0]))
    if exponent == 1:
        return whole(x)
    half = _whole_power(x, exponent // 2)
    square: Complex = _mul(half, half)
    return square if exponent % 2 == 0 else _mul(square, x)


def _equal(x: Any, y: Any) -> Tensor:
    (a, b), (c, d) = parts_of(x), parts_of(y)
    same: Tensor = (a == c) & ((b if d is None else d) == (0 if b is None or d is None else b))
    return same


def _as_real(x: Any) -> Any:
    return _side_by_side(x) if isinstance(x, Complex) else NotImplemented


_EACH = (
    *("alias", "cat", "clone", "copy", "cumsum", "detach", "diag_embed", "diagonal"),
    *("diagonal_scatter", "embedding", "expand", "flip", "gather", "index.Tensor", "index_add"),
    *("index_put", "index_select", "lift_fresh_copy", "mean", "mean.dim", "permute", "repeat"),
    *("roll", "scatter.src", "scatter_add", "select.int", "select_scatter", "slice.Tensor"),
    *("slice_scatter", "split.Tensor", "split_with_sizes", "squeeze", "squeeze.dim"),
    *("squeeze.dims", "stack", "sum", "sum.dim_IntList", "t", "trace", "transpose.int", "tril"),
    *("triu", "unbind.int", "unfold", "unsqueeze", "view", "reshape", "_unsafe_view"),
    *("diagonal_backward", "embedding_dense_backward", "select_backward", "slice_backward"),
)
_FILLED = ("full", "full_like", "new_full", "new_ones", "new_zeros", "ones", "ones_like", "zeros")


def _overload(name: str) -> OpOverload:
    packet, _, overload = name.partition(".")
    found: OpOverload = getattr(getattr(aten, packet), overload or "default")
    return found


FORMS: dict[Any, Callable[..., Any]] = {
    **{_overload(name): _of_each(_overload(name)) for name in _EACH},
    **{_overload(name): _filled(_overload(name)) for name in (*_FILLED, "zeros_like")},
    **{op.default: _product(op.default) for op in (aten.mm, aten.bmm, aten.mv, aten.dot)},
    aten.addmm.default: _with_product(aten.mm.default),
    aten.addmv.default: _with_product(aten.mv.default),
    aten.baddbmm.default: _with_product(aten.bmm.default),
    aten.where.self: _where,
    aten.masked_fill.Scalar: _masked_fill,
    aten.masked_fill.Tensor: _masked_fill,
    aten.constant_pad_nd.default: constant_pad,
    aten.scalar_tensor.default: _filled(aten.scalar_tensor.default),
    aten._to_copy.default: _to_copy,
    aten.add.Tensor: _add,
    aten.add.Scalar: _add,
    aten.sub.Tensor: lambda x, y, *, alpha=1: _add(x, y, alpha=-alpha),
    aten.sub.Scalar: lambda x, y, alpha=1: _add(x, y, alpha=-alpha),
    aten.rsub.Tensor: lambda x, y, *, alpha=1: _add(y, x, alpha=-alpha),
    aten.rsub.Scalar: lambda x, y, alpha=1: _add(_mul(x, -alpha), y),
    aten.mul.Tensor: _mul,
    aten.mul.Scalar: _mul,
    aten.div.Tensor: _div,
    aten.div.Scalar: _div,
    aten.reciprocal.default: functools.partial(_div, 1.0),
    aten.neg.default: lambda x: Complex(*(-part for part in parts_of(x))),
    aten.abs.default: _abs,
    aten.angle.default: _angle,
    aten.sgn.default: _sgn,
    aten.exp.default: _exp,
    aten.log.default: _log,
    aten.sqrt.default: _sqrt,
    aten.pow.Tensor_Scalar: _power,
    aten.pow.Tensor_Tensor: _power,
    aten.pow.Scalar: _power,
    aten.eq.Tensor: _equal,
    aten.eq.Scalar: _equal,
    aten.ne.Tensor: lambda x, y: ~_equal(x, y),
    aten.ne.Scalar: lambda x, y: ~_equal(x, y),
    aten.polar.default: _polar,
    aten.complex.default: lambda re, im: Complex(*torch.broadcast_tensors(re, im)),
    aten.real.default: lambda x: parts_of(x)[0],
    aten.imag.default: lambda x: parts_of(x)[1],
    aten.view_as_real.default: _as_real,
    aten.view_as_complex.default: lambda x: Complex(x.select(-1, 0), x.select(-1, 1)),
    **{
        op.default: lambda x: Complex(parts_of(x)[0], -parts_of(x)[1])
        for op in (aten._conj, aten.conj_physical, aten._conj_physical)
    },
    **{op.default: lambda x: Complex(*parts_of(x)) for op in (aten.resolve_conj, aten.resolve_neg)},
}
