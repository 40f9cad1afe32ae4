"""RMS normalisation in plain torch, forward and backward: what the kernels are held against.

Any device, and any dtype that the op takes; in float64 it is the truth of a verification. With
n = x·rstd, y = n·weight, g = dy·weight, and means over a group:

    dx = rstd·(g - n·mean(g·n))        dweight = Σ_rows dy·n
"""

import torch
from torch import Tensor

from fuseport.ops.rms_norm.shapes import check, check_backward, wide

__all__ = [
    "contiguous",
    "grouped",
    "norm",
    "norm_backward",
    "over_rows",
    "rms_norm",
    "rms_norm_backward",
    "spread",
]


def rms_norm(x: Tensor, weight: Tensor, eps: float, group_size: int) -> tuple[Tensor, Tensor]:
    """out, and the saved rstd = 1/√(mean(x²) + eps), (…, d/group_size), in the wide dtype."""
    check("rms_norm", x, None, weight, eps, group_size)
    n, rstd = norm(x.to(wide(x.dtype)), eps, group_size)
    out = (n * weight.to(n.dtype)).to(x.dtype)
    return contiguous(out), contiguous(rstd.detach())


def rms_norm_backward(
    dout: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, eps: float, group_size: int
) -> tuple[Tensor, Tensor]:
    """dx and dweight, in the dtypes of `x` and `weight`."""
    check("rms_norm_backward", x, None, weight, eps, group_size)
    check_backward("rms_norm_backward", dout, x, rstd, group_size)
    n = x.to(rstd.dtype) * spread(rstd, group_size)
    dy = dout.to(rstd.dtype)
    dx = norm_backward(dy * weight.to(rstd.dtype), n, rstd, group_size)
    dweight = over_rows(dy * n)
    return contiguous(dx.to(x.dtype)), contiguous(dweight.to(weight.dtype))


def norm(x: Tensor, eps: float, group_size: int) -> tuple[Tensor, Tensor]:
    """n and rstd."""
    mean = grouped(x.square(), group_size).mean(-1)
    rstd = (mean + eps).rsqrt()
    return x * spread(rstd, group_size), rstd


def norm_backward(g: Tensor, n: Tensor, rstd: Tensor, group_size: int) -> Tensor:
    """The cotangent of what was normalised, from that of n."""
    mean = grouped(g * n, group_size).mean(-1)
    return spread(rstd, group_size) * (g - n * spread(mean, group_size))


def grouped(t: Tensor, group_size: int) -> Tensor:
    """(…, d) as (…, groups, group_size)."""
    return t.reshape(*t.shape[:-1], t.shape[-1] // group_size, group_size)


def spread(t: Tensor, group_size: int) -> Tensor:
    """(…, groups) as (…, d)."""
    return t.repeat_interleave(group_size, dim=-1)


def over_rows(t: Tensor) -> Tensor:
    """(…, d) summed to (d,)."""
    return t.unsqueeze(0).flatten(0, -2).sum(0)


def contiguous(t: Tensor) -> Tensor:
    """`t` with the strides of a new tensor, which `contiguous` leaves as they are at sizes of 1."""
    wanted = torch.empty(t.shape, device="meta").stride()
    return t if t.stride() == wanted else t.clone(memory_format=torch.contiguous_format)
