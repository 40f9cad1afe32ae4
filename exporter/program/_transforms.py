"""Fourier transforms of as many values as a size says, and what is cut to a size."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import SymInt, Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._sympy.functions import PowByNatural

from fuseport.exporter.program._parts import named

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


def _cut(x: Tensor, index: Any) -> Any:
    # `x[..., :length]`, where x has as many as a power of 2 says: torch would have it of the
    # smaller of both sizes, and so have all that is made of it.
    index = index if isinstance(index, tuple) else (index,)
    if not all(each is Ellipsis or _is_beginning(each) for each in index):
        return NotImplemented
    behind = index[index.index(Ellipsis) + 1 :] if Ellipsis in index else ()
    before = index[: len(index) - len(behind) - (Ellipsis in index)]
    ends = {**dict(enumerate(before)), **{-n: each for n, each in enumerate(behind[::-1], 1)}}
    ends = {dim: each.stop for dim, each in ends.items() if each.stop is not None}
    if not ends or not all(_is_power(x.shape[dim]) for dim in ends):
        return NotImplemented
    if not all(0 <= end <= x.shape[dim] for dim, end in ends.items()):
        return NotImplemented
    sizes = list(x.shape)
    for dim, end in ends.items():
        sizes[dim] = end
        x = x.narrow(dim, 0, end)
    return x.contiguous().view(sizes)  # by which the sizes are what they are, however it is traced


def _is_beginning(index: Any) -> bool:
    if not isinstance(index, slice) or index.start is not None or index.step is not None:
        return False
    return index.stop is None or isinstance(index.stop, SymInt)


def _is_power(size: int | SymInt) -> bool:
    return isinstance(size, SymInt) and bool(size.node.expr.has(PowByNatural))


_SINGLE = (_fft.fft, _fft.ifft, _fft.rfft, _fft.irfft, _fft.hfft, _fft.ihfft)
_SEVERAL = (_fft.fftn, _fft.ifftn, _fft.rfftn, _fft.irfftn, _fft.hfftn, _fft.ihfftn)

TRANSFORMS: Mapping[Any, Callable[..., Any]] = {
    **{func: partial(_sized, func, "n") for func in _SINGLE},
    **{func: partial(_sized, func, "s") for func in (*_PLANES, *_SEVERAL)},
    Tensor.__getitem__: _cut,
}
"""What computes the same, or gives NotImplemented, where the function itself fixes nothing."""
