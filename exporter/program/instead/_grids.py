"""Numbers at even distances, and grids of places at them: of as many as a size says."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import SymInt, Tensor

from fuseport.exporter.program.instead._parts import unlike_the_usual

__all__ = ["GRIDS"]


def _linspace(
    start: Any,
    end: Any,
    steps: Any,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    **others: Any,
) -> Any:
    # Torch's takes a number of steps that is a number. This has its formula: from both ends.
    if not isinstance(steps, torch.SymInt) or unlike_the_usual(others):
        return NotImplemented
    count: Any = steps
    kind = torch.get_default_dtype() if dtype is None else dtype
    if not kind.is_floating_point:
        return NotImplemented
    first, last = (
        at.to(device, kind)
        if isinstance(at, Tensor)
        else torch.full((), at, dtype=kind, device=device)
        for at in (start, end)
    )
    i = torch.arange(count, device=device)
    step = (last - first) / torch.sym_max(count - 1, 1)
    from_start = i < torch.sym_max(count // 2, 1)
    return torch.where(from_start, first + step * i, last - step * (count - 1 - i))


def _frequencies(
    half: bool,
    n: Any,
    d: Any = 1.0,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    **others: Any,
) -> Any:
    # Those of a Fourier transform. Torch's takes a length that is a number, and ONNX has none.
    if unlike_the_usual(others):
        return NotImplemented
    i = torch.arange(n // 2 + 1 if half else n, device=device)
    whole = i if half else torch.where(i < (n + 1) // 2, i, i - n)
    kind = torch.get_default_dtype() if dtype is None else dtype
    return whole.to(kind) * (1 / (n * d))


def _affine_grid(theta: Tensor, size: Sequence[Any], align_corners: bool | None = None) -> Any:
    # Torch's takes sizes for numbers, since it multiplies places by (size - 1) / size.
    dims = len(size) - 2
    symbolic = any(isinstance(n, SymInt) for n in size)
    if not symbolic or dims not in (2, 3) or theta.shape[1:] != (dims, dims + 1):
        return NotImplemented
    axes = [_axis(n, bool(align_corners), theta) for n in size[2:]]
    places = torch.meshgrid(*axes, indexing="ij")
    homogeneous = torch.stack([*reversed(places), torch.ones_like(places[0])], -1)
    flat = homogeneous.flatten(0, -2).expand(size[0], -1, -1)
    return flat.bmm(theta.mT).unflatten(1, size[2:])


def _axis(size: Any, align_corners: bool, like: Tensor) -> Tensor:
    """Between -1 and 1 the middles of `size` parts, or the ends of one less; of one the middle."""
    doubled = 2 * torch.arange(size, device=like.device) + 1 - size
    exact = doubled.to(torch.promote_types(like.dtype, torch.float32))
    places: Tensor = exact / (torch.sym_max(size - 1, 1) if align_corners else size)
    return places.to(like.dtype)


GRIDS: Mapping[Any, Callable[..., Any]] = {
    torch.linspace: _linspace,
    torch.fft.fftfreq: partial(_frequencies, False),
    torch.fft.rfftfreq: partial(_frequencies, True),
    F.affine_grid: _affine_grid,
}
"""What computes the same, or gives NotImplemented, where the function itself fixes nothing."""
