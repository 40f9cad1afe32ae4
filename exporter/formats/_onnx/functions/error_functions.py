"""The error function's complement in ONNX, which has that function alone: where it is nearly one,
what it lacks is rounded off.

Source: log(erfcx(x) / t) for x ≥ 0 as Chebyshev's polynomials of 2 t - 1, where t is 2 / (2 + x).
The coefficients are of 64 nodes, in 40 digits.
"""

import math

import torch
from torch import Tensor

from fuseport.exporter.formats._onnx.functions.special import in_float32, log1p
from fuseport.exporter.program.rewriting import Table

__all__ = ["ERROR_FUNCTIONS"]

aten = torch.ops.aten

_COEFFICIENTS = (
    *(-6.5132685989085470e-01, 6.4196979235649021e-01, 1.9476473204185836e-02),
    *(-9.5615147868086323e-03, -9.4659534448203692e-04, 3.6683949785276145e-04),
    *(4.2523324806907769e-05, -2.0278578112534242e-05, -1.6242900046470256e-06),
    *(1.3036558355805232e-06, 1.5626441722066142e-08, -8.5238095914926541e-08),
    *(6.5290544390988515e-09, 5.0593434955514693e-09, -9.9136415649303307e-10),
    *(-2.2736512229318360e-10, 9.6467911020155270e-11, 2.3940380830391146e-12),
    *(-6.8860275264975532e-12, 8.9448792730907253e-13, 3.1309213993429581e-13),
    *(-1.1270822361367252e-13, 3.8109052551892321e-16, 7.1060976136092371e-15),
    *(-1.5230282014571043e-15, -9.4574945712912334e-17, 1.2102371892242790e-16),
    *(-2.8166630877471771e-17,),
)
_OF_FLOAT32 = 13  # of these; the rest is less than its rounding


@in_float32
def _erfcx(x: Tensor) -> Tensor:
    """exp(x²) · erfc(x)."""
    scaled = _scaled(x.abs())
    return torch.where(x < 0, 2 * torch.exp(x * x) - scaled, scaled)


def _scaled(x: Tensor) -> Tensor:
    """The same of numbers that are not negative."""
    taken = _COEFFICIENTS if x.dtype == torch.float64 else _COEFFICIENTS[:_OF_FLOAT32]
    t = 2 / (2 + x)
    y = 2 * t - 1
    one, two = torch.zeros_like(x), torch.zeros_like(x)
    for coefficient in reversed(taken[1:]):  # Clenshaw's
        one, two = 2 * y * one - two + coefficient, one
    return t * torch.exp(y * one - two + taken[0])


@in_float32
def _log_ndtr(x: Tensor) -> Tensor:
    """The logarithm of the normal distribution's share below x."""
    z = x * math.sqrt(0.5)
    half = _scaled(z.abs()) / 2
    return torch.where(x < 0, torch.log(half) - z * z, log1p(-half * torch.exp(-z * z)))


ERROR_FUNCTIONS: Table = {
    aten.special_erfcx.default: _erfcx,
    aten.special_log_ndtr.default: _log_ndtr,
    torch.ops.prims.erfcx.default: _erfcx,
}
