"""Stands in for `selective_scan_cuda_oflex`, the extension of MzeroMiko/VMamba."""

from typing import Any

from torch import Tensor

from fuseport.exporter.shims import _vmamba

__all__ = ["bwd", "fwd"]


def fwd(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
    nrows: int,
    out_float: bool,
) -> list[Tensor]:
    """`[out, x]`, out in float32 if `out_float`; see `_vmamba.fwd`. `nrows` is for CUDA only."""
    return _vmamba.fwd(u, delta, A, B, C, D, delta_bias, delta_softplus, out_float=out_float)


def bwd(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    delta_bias: Tensor | None,
    dout: Tensor,
    x: Tensor | None,
    delta_softplus: bool,
    nrows: int,
) -> list[Any]:
    """`[du, ddelta, dA, dB, dC, dD, ddelta_bias]`; see `_vmamba.bwd`."""
    return _vmamba.bwd(u, delta, A, B, C, D, delta_bias, dout, delta_softplus)
