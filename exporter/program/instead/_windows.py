"""Windows, `torch.hann_window(length)` and the others, of a length that is a size."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import SymInt, Tensor

from fuseport.exporter.program.instead._parts import named, unlike_the_usual

__all__ = ["WINDOWS"]


def _window(names: Sequence[str], form: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Any:
    # Not of a length that is a number, which torch's own takes alone.
    given = named(("window_length", *names), args, kwargs)
    length = given.pop("window_length", None)
    dtype, device = given.pop("dtype", None), given.pop("device", None)
    periodic = given.pop("periodic", True)
    numbers = [given.pop(name) for name in names[1:] if name in given]
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(length, SymInt) or unlike_the_usual(given) or not dtype.is_floating_point:
        return NotImplemented
    count: Any = length  # which torch's stubs take for none
    wide = torch.promote_types(dtype, torch.float32)
    # Of which the window has the first ones, up to the last if that is in it.
    steps = torch.scalar_tensor(count - (not periodic), dtype=wide, device=device).clamp(min=1)
    places = torch.arange(count, dtype=wide, device=device) / steps
    one = torch.scalar_tensor(count, dtype=torch.int64, device=device) == 1
    return torch.where(one, 1.0, form(places, *numbers)).to(dtype)


def _cosines(places: Tensor, weights: Sequence[float]) -> Tensor:
    found = torch.full_like(places, weights[0])
    for i, weight in enumerate(weights[1:], 1):
        found = found + weight * torch.cos(places * (2 * math.pi * i))
    return found


def _hann(places: Tensor) -> Tensor:
    return _cosines(places, (0.5, -0.5))


def _hamming(places: Tensor, alpha: float = 0.54, beta: float = 0.46) -> Tensor:
    return _cosines(places, (alpha, -beta))


def _blackman(places: Tensor) -> Tensor:
    return _cosines(places, (0.42, -0.5, 0.08))


def _bartlett(places: Tensor) -> Tensor:
    return torch.minimum(2 * places, 2 - 2 * places)


def _kaiser(places: Tensor, beta: float = 12.0) -> Tensor:
    """I₀(β√t) / I₀(β) for t = 4p(1 - p), by the series of I₀, whose terms are all positive.

    Source: Abramowitz and Stegun, "Handbook of Mathematical Functions", 9.6.12.
    """
    t = 4 * places * (1 - places)
    logarithm = 2 * math.log(abs(beta) / 2) if beta else -math.inf
    count = int(abs(beta) / 2 + 10 * math.sqrt(abs(beta)) + 20)
    logarithms = [(k * logarithm if k else 0.0) - 2 * math.lgamma(k + 1) for k in range(count)]
    terms = [math.exp(each - max(logarithms)) for each in logarithms]
    found = torch.full_like(t, terms[-1] / sum(terms))
    for term in reversed(terms[:-1]):
        found = found * t + term / sum(terms)
    return found


WINDOWS: Mapping[Any, Callable[..., Any]] = {
    torch.hann_window: partial(_window, ("periodic",), _hann),
    torch.hamming_window: partial(_window, ("periodic", "alpha", "beta"), _hamming),
    torch.blackman_window: partial(_window, ("periodic",), _blackman),
    torch.bartlett_window: partial(_window, ("periodic",), _bartlett),
    torch.kaiser_window: partial(_window, ("periodic", "beta"), _kaiser),
}
"""What computes the same, or gives NotImplemented, where the length is a number."""
