"""How large a tensor is, and how far it is from another one."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

__all__ = ["Norms", "beyond", "errors", "is_finite_somewhere", "is_zero", "norms", "parts"]

# Elements at a time: they stay in the cache, memory stays bounded, and torch does not split them
# among threads, which for steps as short as these costs more than it gives.
_CHUNK = 2**15


@dataclass(frozen=True)
class Norms:
    """The largest and the root mean square absolute value of a tensor, or of an error."""

    max_abs: float
    rms: float


def errors(value: Tensor, truth: Tensor) -> Norms:
    """How far `value` is from the truth, of the same shape.

    Equal infinities, and NaN where the truth has NaN, are no error; any other is an infinite one.
    Where the tensors are not floating, a difference counts as 1.
    """
    largest, squares = 0.0, 0.0
    for part, exact in parts(value, truth):
        if exact.is_floating_point():
            difference = (part - exact).abs_()  # in float64, as the truth is
            if not bool(difference.max() < math.inf):  # written so that NaN is seen
                same = (part == exact) | (part.isnan() & exact.isnan())
                difference = difference.nan_to_num(nan=math.inf, posinf=math.inf)
                difference = difference.masked_fill(same, 0.0)
        else:
            difference = (part != exact).double()
        largest = max(largest, float(difference.max()))
        squares += float(difference.square_().sum())
    return Norms(largest, math.sqrt(squares / max(1, value.numel())))


def beyond(value: Tensor, truth: Tensor, rtols: Sequence[float]) -> list[float]:
    """How far `value` is from the truth beyond each relative tolerance.

    That is max(|error| - rtol·|truth|) over the elements, at least 0. Where NaN and
    infinities are those of the truth they are no error.
    """
    largest = dict.fromkeys(rtols, 0.0)
    for part, exact in parts(value, truth):
        error, size = (part - exact).abs_(), exact.abs()  # in float64, as the truth is
        if not bool(error.max() < math.inf):  # written so that NaN is seen
            same = (part == exact) | (part.isnan() & exact.isnan())
            error, size = error.masked_fill_(same, 0.0), size.masked_fill_(same, 0.0)
        for rtol in sorted(largest):
            over = error.sub(size, alpha=rtol)
            # What a tolerance covers every wider one covers too: few elements are left soon.
            left = (~(over <= 0.0)).nonzero().squeeze(1)
            if not left.numel():
                break
            error, size = error[left], size[left]
            largest[rtol] = max(float(over.max()), largest[rtol])
    return [largest[rtol] for rtol in rtols]


def norms(tensor: Tensor) -> Norms:
    """Of a tensor's finite values."""
    largest, squares = 0.0, 0.0
    for part, _ in parts(tensor, tensor):
        size = part.double().abs().nan_to_num(nan=0.0, posinf=0.0)
        largest = max(largest, float(size.max()))
        squares += float(size.square_().sum())
    return Norms(largest, math.sqrt(squares / max(1, tensor.numel())))


def is_zero(tensor: Tensor) -> bool:
    """Whether its finite values are exactly zero."""
    return not any(bool((part.isfinite() & (part != 0)).any()) for part, _ in parts(tensor, tensor))


def is_finite_somewhere(tensor: Tensor) -> bool:
    """Whether it has a finite value, or none at all."""
    return not tensor.numel() or any(bool(p.isfinite().any()) for p, _ in parts(tensor, tensor))


def parts(one: Tensor, other: Tensor, size: int = _CHUNK) -> Iterator[tuple[Tensor, Tensor]]:
    """Both tensors, of the same shape, by flat parts of up to `size` elements."""
    pairs = zip(one.reshape(-1).split(size), other.reshape(-1).split(size), strict=True)
    return (pair for pair in pairs if pair[0].numel())
