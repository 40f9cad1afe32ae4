"""Stands in for `selective_scan_cuda_oflex_rh`, the extension of Spatial-Mamba.

It gives the states, h, where others give C·h + D·u.
"""

from typing import Any

import torch
from torch import Tensor

from fuseport.exporter.shims import _vmamba
from fuseport.exporter.shims._gradients import differentiated

__all__ = ["bwd", "fwd"]


def fwd(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    D: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
    nrows: int,
    out_float: bool,
) -> list[Tensor]:
    """`[out, x]`: the states at all steps, (b, d, N, l), and `x` as `_scan.saved` has it.

    Args:
        u: (b, d, l).
        delta: (b, d, l).
        A: (d, N), real.
        B: (b, G, N, l).
        D: (d,), which the extension takes and does not use, or None.
        delta_bias: (d,), or None.
        delta_softplus: whether delta + delta_bias passes through softplus.
        nrows: for CUDA only.
        out_float: out in float32, whatever u's dtype, not rounded to that on the way.
    """
    one, each = torch.ones_like(B[:, :, :1]), zip(A.split(1, 1), B.split(1, 2), strict=True)
    found = [
        _vmamba.fwd(u, delta, a, b, one, None, delta_bias, delta_softplus, out_float)
        for a, b in each
    ]
    outs, saved = zip(*found, strict=True)
    return [torch.stack(outs, 2), torch.cat(saved, -1)]


def bwd(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    D: Tensor | None,
    delta_bias: Tensor | None,
    dout: Tensor,
    x: Tensor | None,
    delta_softplus: bool,
    nrows: int,
) -> list[Any]:
    """`[du, ddelta, dA, dB, dD, ddelta_bias]`, in their shapes and dtypes; dD is zero, or None."""
    out_float = dout.dtype == torch.float32

    def again(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, bias: Tensor | None) -> Tensor:
        return fwd(u, delta, A, B, None, bias, delta_softplus, nrows, out_float)[0]

    *most, dbias = differentiated(again, (u, delta, A, B, delta_bias), dout)
    return [*most, None if D is None else torch.zeros_like(D), dbias]
