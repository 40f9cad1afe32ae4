"""Stands in for `selective_scan_cuda`, the extension of state-spaces/mamba."""

from typing import Any

from torch import Tensor

from fuseport.exporter.shims import _scan
from fuseport.exporter.shims._gradients import of_gated

__all__ = ["bwd", "fwd"]


def fwd(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
) -> list[Tensor]:
    """`[out, x]`, and `out_z` where z is given.

    `out` is before the gate, `out_z` after it, `x` as `_scan.saved` has it. The arguments are those
    of `fuseport.ops.selective_scan`.
    """
    out, x = _scan.scan(u, delta, A, B, C, D, delta_bias, delta_softplus)
    if z is None:
        return [out, x]
    return [out, x, _scan.gated(u, delta, A, B, C, D, z, delta_bias, delta_softplus)]


def bwd(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    dout: Tensor,
    x: Tensor | None,
    out: Tensor | None,
    dz: Tensor | None,
    delta_softplus: bool,
    recompute_out_z: bool,
) -> list[Any]:
    """`[du, ddelta, dA, dB, dC, dD, ddelta_bias]`, then `dz` with z, then `out_z` if wanted.

    `dout` is the cotangent of what the forward gives: of `out_z` where z is given. `x` and `out`,
    which the extension goes on from, are not needed; `dz` is written to if it is given.
    """

    def again(*inputs: Any) -> Tensor:
        given: tuple[Any, ...] = (*inputs, delta_softplus)
        return _scan.gated(*given)

    inputs = (u, delta, A, B, C, D, z, delta_bias)
    return of_gated(again, inputs, dout, dz, again=recompute_out_z)
