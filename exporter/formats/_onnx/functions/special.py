"""Functions that ONNX has not, in terms of those that it has."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["SPECIAL", "in_float32", "log1p", "sigmoid", "signbit"]

aten = torch.ops.aten

# The highest power first: of w - 2.5 where w, -log(1 - y²), is below 5, and of √w - 3 elsewhere.
_CENTRAL = (
    *(2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 2.1858087e-04),
    *(-1.25372503e-03, -4.17768164e-03, 2.46640727e-01, 1.50140941),
)
_TAIL = (
    *(-2.00214257e-04, 1.00950558e-04, 1.34934322e-03, -3.67342844e-03, 5.73950773e-03),
    *(-7.6224613e-03, 9.43887047e-03, 1.00167406, 2.83297682),
)


def sigmoid(x: Tensor) -> Any:
    """1/(1 + e^-x), of float32.

    ONNX Runtime's own is right to 1.7e-7, not to so many digits: it is off by half a percent at
    -11, as is the gradient of a gate that is nearly shut.
    """
    if x.dtype != torch.float32:
        return NotImplemented
    return (1 + (-x).exp()).reciprocal()


def in_float32(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function that is computed in float32 of half precision."""

    @functools.wraps(function)
    def computed(x: Tensor) -> Tensor:
        if x.dtype in (torch.float16, torch.bfloat16):
            return function(x.float()).to(x.dtype)
        return function(x)

    return computed


@in_float32
def log1p(x: Tensor) -> Tensor:
    """log(1 + x), to as many digits where x is small.

    Source: Kahan's, in Higham, "Accuracy and Stability of Numerical Algorithms", 1.14.1.
    """
    more = 1 + x
    taken = more - 1
    off = torch.where(taken == x, 1, x / taken)  # infinite values are taken whole
    return torch.where(more == 1, x, torch.log(more) * off)


def _logaddexp(x: Tensor, y: Tensor) -> Tensor:
    """log(exp(x) + exp(y)), of which the smaller one is not rounded off."""
    apart = torch.where(x == y, 0, (x - y).abs())  # infinite ones, too
    return torch.maximum(x, y) + log1p(torch.exp(-apart))


def _log_sigmoid_forward(x: Tensor) -> tuple[Tensor, Tensor]:
    """The logarithm of a sigmoid, and exp(-|x|): ONNX's own is that of what is rounded to 0."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    small = torch.exp(-wide.abs())
    return (wide.clamp(max=0) - log1p(small)).to(x.dtype), small.to(x.dtype)


@in_float32
def _erfinv(y: Tensor) -> Tensor:
    """The inverse of the error function.

    Source: Giles, "Approximating the erfinv function", 2010, for float32; in float64 a step of
    Halley's method makes the rest of it.
    """
    w = -torch.log((1 - y) * (1 + y))
    central = _polynomial(_CENTRAL, w - 2.5)
    tail = _polynomial(_TAIL, torch.sqrt(torch.where(w < 5, 5, w)) - 3)
    x = torch.where(w < 5, central, tail) * y
    if y.dtype == torch.float64:
        off = (torch.erf(x) - y) * (math.sqrt(math.pi) / 2) * torch.exp(x * x)
        # Where y is nearly one, erf rounds off more than that step would mend.
        x = torch.where(1 - y.abs() < 1e-9, x, x - off / (1 + x * off))
    return torch.where(y.abs() == 1, y * math.inf, x)


def _polynomial(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    value = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        value = value * x + coefficient
    return value


def _hypot(x: Tensor, y: Tensor) -> Tensor:
    """√(x² + y²), where the squares may be too large or too small."""
    large, small = torch.maximum(x.abs(), y.abs()), torch.minimum(x.abs(), y.abs())
    ratio = small / torch.where(large > 0, large, 1)
    return torch.where(torch.isinf(large), large, large * torch.sqrt(1 + ratio * ratio))


def signbit(x: Tensor) -> Any:
    """Whether a number is negative, or the negative zero."""
    return (x < 0) | ((x == 0) & (1 / x < 0)) if x.is_floating_point() else x < 0


def _known_one(of_two: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Of two numbers of which one is not a number, the other."""

    def found(x: Tensor, y: Tensor) -> Tensor:
        # ONNX asks that of floating numbers alone.
        if not x.is_floating_point():
            return of_two(x, y)
        return torch.where(x.isnan(), y, torch.where(y.isnan(), x, of_two(x, y)))

    return found


def _bernoulli(x: Tensor, p: float | None = None, *, generator: Any = None) -> Tensor:
    # ONNX Runtime's Bernoulli, 1.31 at least, draws a one as often as it should a zero.
    return (torch.rand_like(x) < (x if p is None else p)).to(x.dtype)


SPECIAL: dict[Any, Callable[..., Any]] = {
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.p: _bernoulli,
    aten.erfinv.default: _erfinv,
    aten.hypot.default: _hypot,
    aten.log1p.default: log1p,
    aten.log_sigmoid.default: lambda x: _log_sigmoid_forward(x)[0],
    aten.log_sigmoid_forward.default: _log_sigmoid_forward,
    aten.logaddexp.default: _logaddexp,
    torch.ops.prims.fmax.default: _known_one(torch.maximum),
    torch.ops.prims.fmin.default: _known_one(torch.minimum),
    torch.ops.prims.signbit.default: signbit,
}
