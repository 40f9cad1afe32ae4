"""Fourier transforms of as many values as a size says."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fuseport.exporter.program.instead._parts import named

__all__ = ["TRANSFORMS"]

_fft = torch.fft
_HALVED = (_fft.irfft, _fft.hfft, _fft.irfft2, _fft.irfftn, _fft.hfft2, _fft.hfftn)
"""Those whose last input has one value for a frequency and its negative."""

_PLANES = (_fft.fft2, _fft.ifft2, _fft.rfft2, _fft.irfft2, _fft.hfft2, _fft.ihfft2)


def _sized(func: Any, of: str, *args: Any, **kwargs: Any) -> Any:
    # Of an input that has as many values as it takes. Torch asks whether there are too few or too
    # many, and of dynamic sizes the example answers.
    given = named(("input", of, "dim", "norm"), args, kwargs)
    x, dim, sizes = given["input"], given.get("dim"), given.get(of)
    if sizes is None:
        return NotImplemented
    if of == "n":
        sizes, dims = [sizes], [-1 if dim is None else dim]
    else:
        last = range(-2 if func in _PLANES else -len(sizes), 0)
        dims = list(last if dim is None else dim)
    for number, (at, size) in enumerate(zip(dims, sizes, strict=True), 1):
        if isinstance(size, int) and size == -1:
            continue
        wanted = size // 2 + 1 if func in _HALVED and number == len(dims) else size
        there = x.shape[at]
        if not any(map(statically_known_true, (there <= wanted, there >= wanted))):
            before = at % x.dim()
            x = F.pad(x, [0, 0] * (x.dim() - 1 - before) + [0, wanted]).narrow(at, 0, wanted)
    return NotImplemented if x is given["input"] else func(**{**given, "input": x})


_SINGLE = (_fft.fft, _fft.ifft, _fft.rfft, _fft.irfft, _fft.hfft, _fft.ihfft)
_SEVERAL = (_fft.fftn, _fft.ifftn, _fft.rfftn, _fft.irfftn, _fft.hfftn, _fft.ihfftn)

TRANSFORMS: Mapping[Any, Callable[..., Any]] = {
    **{func: partial(_sized, func, "n") for func in _SINGLE},
    **{func: partial(_sized, func, "s") for func in (*_PLANES, *_SEVERAL)},
}
"""What computes the same, or gives NotImplemented, where the function itself fixes nothing."""
