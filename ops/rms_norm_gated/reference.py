"""The gated norm in plain torch, forward and backward: what the kernels are held against.

Any device, and any dtype that the op takes; in float64 it is the truth of a verification. With
s = SiLU(z) = z·σ(z), s' = σ(z)·(1 + z·(1 - σ(z))), and n the normalised x or, for the other order,
the normalised v = x·s:

    norm before gate: y = n·weight·s, g = dy·s·weight, dx is the norm's, dz = dy·n·weight·s',
                      dweight = Σ_rows dy·s·n
    gate before norm: y = n·weight, g = dy·weight, dv is the norm's, dx = dv·s, dz = dv·x·s',
                      dweight = Σ_rows dy·n
"""

import torch.nn.functional as F
from torch import Tensor

from fuseport.ops.rms_norm.reference import contiguous, norm, norm_backward, over_rows, spread
from fuseport.ops.rms_norm.shapes import check, check_backward, wide

__all__ = ["rms_norm_gated", "rms_norm_gated_backward"]


def rms_norm_gated(
    x: Tensor, z: Tensor, weight: Tensor, eps: float, group_size: int, norm_before_gate: bool
) -> tuple[Tensor, Tensor]:
    """out, and the saved rstd of what is normalised, (…, d/group_size), in the wide dtype."""
    check("rms_norm_gated", x, z, weight, eps, group_size)
    v, s = x.to(wide(x.dtype)), F.silu(z.to(wide(x.dtype)))
    if norm_before_gate:
        n, rstd = norm(v, eps, group_size)
        out = n * weight.to(n.dtype) * s
    else:
        n, rstd = norm(v * s, eps, group_size)
        out = n * weight.to(n.dtype)
    return contiguous(out.to(x.dtype)), contiguous(rstd.detach())


def rms_norm_gated_backward(
    dout: Tensor,
    x: Tensor,
    z: Tensor,
    weight: Tensor,
    rstd: Tensor,
    eps: float,
    group_size: int,
    norm_before_gate: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dz and dweight, in the dtypes of `x`, `z` and `weight`."""
    check("rms_norm_gated_backward", x, z, weight, eps, group_size)
    check_backward("rms_norm_gated_backward", dout, x, rstd, group_size)
    v, gate, w, dy = (t.to(rstd.dtype) for t in (x, z, weight, dout))
    sigmoid = gate.sigmoid()
    s, slope = gate * sigmoid, sigmoid * (1 + gate * (1 - sigmoid))
    r = spread(rstd, group_size)
    if norm_before_gate:
        n, dn = v * r, dy * s
        dx = norm_backward(dn * w, n, rstd, group_size)
        dz = dy * n * w * slope
    else:
        n, dn = v * s * r, dy
        dv = norm_backward(dn * w, n, rstd, group_size)
        dx, dz = dv * s, dv * v * slope
    dweight = over_rows(dn * n)
    return (
        contiguous(dx.to(x.dtype)),
        contiguous(dz.to(z.dtype)),
        contiguous(dweight.to(weight.dtype)),
    )
