"""The gamma function's logarithm and its derivatives, and Bessel functions, which ONNX has not.

All in float64, by series that are given to its last digits.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["GAMMAS"]

aten = torch.ops.aten

_FAR = 8  # from there on, series in 1/x have all digits
_TERMS = 11  # of these
_EULER = 0.57721566490153286
_BESSEL_FAR, _BESSEL_TERMS, _BESSEL_FAR_TERMS = 20, 46, 30


def _wide(x: Tensor) -> tuple[Tensor, torch.dtype]:
    """In float64, and the dtype of the result."""
    dtype = x.dtype if x.is_floating_point() else torch.get_default_dtype()
    return x.to(torch.float64), dtype


@cache
def _bernoulli(n: int) -> Fraction:
    if n == 0:
        return Fraction(1)
    return -sum((math.comb(n + 1, k) * _bernoulli(k) for k in range(n)), Fraction(0)) / (n + 1)


@cache
def _zeta_less_one(k: int) -> float:
    """ζ(k) - 1: what is behind ten terms, by Euler's and Maclaurin's formula."""
    terms = [Fraction(1, n**k) for n in range(2, 10)]
    terms += [Fraction(1, (k - 1) * 10 ** (k - 1)), Fraction(1, 2 * 10**k)]
    for i in range(1, 10):
        rising = math.prod(range(k, k + 2 * i - 1))
        terms.append(_bernoulli(2 * i) * rising / math.factorial(2 * i) / 10 ** (k + 2 * i - 1))
    return float(sum(terms, Fraction(0)))


def _series(coefficients: Sequence[float], x: Tensor) -> Tensor:
    """The first coefficient is that of 1."""
    value = torch.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        value = value * x + coefficient
    return value


def _from_whole(x: Tensor) -> Tensor:
    return x - torch.round(x)


def _cotangent(x: Tensor) -> Tensor:
    """Of πx, without a tangent, which ONNX Runtime does not have in float64."""
    angle = math.pi * _from_whole(x)
    return torch.cos(angle) / torch.sin(angle)


def _lgamma(x: Tensor) -> Tensor:
    """The logarithm of the absolute value of the gamma function."""
    wide, dtype = _wide(x)
    reflected = wide <= 0
    found = _lgamma_of_positive(torch.where(reflected, 1 - wide, wide))
    sine = torch.sin(math.pi * _from_whole(wide)).abs()
    found = torch.where(reflected, math.log(math.pi) - torch.log(sine) - found, found)
    return torch.where(wide.isinf(), math.inf, found).to(dtype)


def _lgamma_of_positive(x: Tensor) -> Tensor:
    """By its series around 2, at which it is 0, and as it is at 1; far off, by Stirling's.

    Source: Abramowitz and Stegun, 6.1.33 and 6.1.41.
    """
    is_far = x >= _FAR
    near = torch.where(is_far, 2, x)
    more = torch.ones_like(near)
    place = near - 2
    for i in range(1, _FAR - 1):
        beyond = near - i >= 1.5
        more = more * torch.where(beyond, near - i, 1)
        place = torch.where(beyond, near - 2 - i, place)
    place = torch.where(near < 0.5, near, torch.where(near < 1.5, near - 1, place))
    less = torch.where(near < 0.5, near * (near + 1), torch.where(near < 1.5, near, 1))
    around = [1 - _EULER, *((-1) ** k * _zeta_less_one(k) / k for k in range(2, 30))]
    close = place * _series(around, place) + torch.log(more) - torch.log(less)
    far = torch.where(is_far, x, _FAR)
    inverse = far.reciprocal()
    terms = [float(_bernoulli(2 * k) / (2 * k * (2 * k - 1))) for k in range(1, _TERMS)]
    rest = inverse * _series(terms, inverse * inverse) + 0.5 * math.log(2 * math.pi)
    return torch.where(is_far, (far - 0.5) * torch.log(far) - far + rest, close)


def _shifted(x: Tensor, of_each: Callable[[Tensor], Tensor], far: int) -> tuple[Tensor, Tensor]:
    """A number beyond `far` that is whole numbers above x, and the sum over those before it."""
    total = torch.zeros_like(x)
    for _ in range(far):
        is_near = x < far
        total = total + torch.where(is_near, of_each(x), 0)
        x = torch.where(is_near, x + 1, x)
    return x, total


def _digamma(x: Tensor) -> Tensor:
    """Source: Abramowitz and Stegun, 6.3.5, 6.3.7 and 6.3.18."""
    wide, dtype = _wide(x)
    reflected = wide < 0
    far, less = _shifted(torch.where(reflected, 1 - wide, wide), torch.reciprocal, _FAR)
    inverse = far.reciprocal()
    square = inverse * inverse
    terms = [float(_bernoulli(2 * k) / (2 * k)) for k in range(1, _TERMS)]
    found = torch.log(far) - 0.5 * inverse - square * _series(terms, square) - less
    is_whole = wide == torch.round(wide)
    turned = torch.where(is_whole, math.nan, found - math.pi * _cotangent(wide))
    found = torch.where(reflected, turned, found)
    return torch.where(wide == 0, -wide.reciprocal(), found).to(dtype)


def _trigamma(x: Tensor) -> Tensor:
    """The derivative of digamma, by as many terms as torch takes, which are right to 5e-10.

    Source: Abramowitz and Stegun, 6.4.7 and 6.4.12.
    """
    wide, dtype = _wide(x)
    reflected = wide < 0.5
    far = torch.where(reflected, 1 - wide, wide)
    found = torch.zeros_like(far)
    for _ in range(6):
        found = found + (far * far).reciprocal()
        far = far + 1
    inverse = far.reciprocal()
    square = inverse * inverse
    terms = [float(_bernoulli(2 * k)) for k in range(1, 4)]
    found = found + inverse * (1 + 0.5 * inverse + square * _series(terms, square))
    sine = torch.sin(math.pi * _from_whole(wide))
    return torch.where(reflected, math.pi**2 / (sine * sine) - found, found).to(dtype)


def _polygamma(n: int, x: Tensor) -> Tensor:
    """The n-th derivative of digamma: ±n! ζ(n + 1, x), of negative numbers by reflection.

    Source: Abramowitz and Stegun, 6.4.7 and 6.4.10, 23.2.3 (as is, of Hurwitz's function).
    """
    if n < 2:
        return _trigamma(x) if n else _digamma(x)
    wide, dtype = _wide(x)
    reflected = wide < 0
    s, sign = n + 1, -1 if n % 2 == 0 else 1
    positive = torch.where(reflected, 1 - wide, wide.abs())
    far, total = _shifted(positive, lambda y: y ** (-s), _FAR + s)
    inverse = far.reciprocal()
    rising = (math.prod(range(s, s + 2 * k - 1)) for k in range(1, _TERMS))
    terms = [_bernoulli(2 * k) * r / math.factorial(2 * k) for k, r in enumerate(rising, 1)]
    tail = far / n + 0.5 + inverse * _series([float(t) for t in terms], inverse * inverse)
    found = sign * math.factorial(n) * (total + tail * far ** (-s))
    off = _series(_derivative_of_cotangent(n), _cotangent(wide))
    turned = torch.where(wide == torch.round(wide), sign * math.inf, -sign * found - off)
    return torch.where(reflected, turned, found).to(dtype)


def _derivative_of_cotangent(n: int) -> list[float]:
    """The n-th of π·cot(πx), as a polynomial of cot(πx): its own derivative is -π (1 + cot²)."""
    powers = [0, 1]
    for _ in range(n):
        slopes = [k * c for k, c in enumerate(powers)][1:]
        powers = [-(a + b) for a, b in zip([*slopes, 0, 0], [0, 0, *slopes], strict=True)]
    return [math.pi ** (n + 1) * c for c in powers]


def _mvlgamma(x: Tensor, p: int) -> Tensor:
    wide, dtype = _wide(x)
    steps = -torch.arange(p, dtype=torch.float64, device=x.device) / 2
    found = _lgamma(wide.unsqueeze(-1) + steps).sum(-1)
    return (found + p * (p - 1) / 4 * math.log(math.pi)).to(dtype)


def _bessel(x: Tensor, order: int, *, scaled: bool) -> Tensor:
    """I₀ or I₁, times exp(-|x|) where it is scaled.

    Source: Abramowitz and Stegun, 9.6.10 and 9.7.1.
    """
    wide, dtype = _wide(x)
    size = wide.abs()
    is_far = size > _BESSEL_FAR
    near = torch.where(is_far, 0, size)
    # By parts of what is near at most: numbers below 1e-45 are lost where they become float32.
    most = _BESSEL_FAR**2 // 4
    terms = [
        float(Fraction(most**k, math.factorial(k) * math.factorial(k + order)))
        for k in range(_BESSEL_TERMS)
    ]
    close = _series(terms, near * near / (4 * most)) * (near / 2 if order else 1)
    far = torch.where(is_far, size, _BESSEL_FAR)
    factors = [Fraction(1)]
    for k in range(1, _BESSEL_FAR_TERMS):
        factors.append(-factors[-1] * (4 * order**2 - (2 * k - 1) ** 2) / (8 * k))
    beyond = _series([float(f) for f in factors], far.reciprocal()) * torch.rsqrt(2 * math.pi * far)
    if scaled:
        found = torch.where(is_far, beyond, close * torch.exp(-near))
    else:
        half = torch.exp(far / 2)  # of which the square may be too large, and the product not
        found = torch.where(is_far, beyond * half * half, close)
    return (found * torch.sign(wide) if order else found).to(dtype)


GAMMAS: dict[Any, Callable[..., Any]] = {
    aten.digamma.default: _digamma,
    aten.i0.default: lambda x: _bessel(x, 0, scaled=False),
    aten.lgamma.default: _lgamma,
    aten.mvlgamma.default: _mvlgamma,
    aten.polygamma.default: _polygamma,
    aten.special_i0e.default: lambda x: _bessel(x, 0, scaled=True),
    aten.special_i1.default: lambda x: _bessel(x, 1, scaled=False),
    aten.special_i1e.default: lambda x: _bessel(x, 1, scaled=True),
}
