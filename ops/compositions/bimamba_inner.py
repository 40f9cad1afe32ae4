"""The inner block of a Mamba that scans both ways and shares all but A between the directions.

Signature and semantics follow `bimamba_inner_fn` of the fork of state-spaces/mamba in hustvl/Vim,
there called bimamba "v1".
"""

import torch.nn.functional as F
from torch import Tensor

from fuseport.ops.compositions.mamba_inner import scan_inputs
from fuseport.ops.selective_scan import selective_scan

__all__ = ["bimamba_inner_fn"]


def bimamba_inner_fn(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,
    A_b: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    B_proj_bias: Tensor | None = None,
    C_proj_bias: Tensor | None = None,
    delta_softplus: bool = True,
) -> Tensor:
    """`mamba_inner_fn`, with a second scan from the end to the beginning, both summed.

    Args:
        xz: (b, 2d, l), and so on: as `mamba_inner_fn`.
        A_b: (d, N), of the second scan.

    Returns:
        (b, l, o), in out_proj_weight's dtype.

    Raises:
        ValueError: as `mamba_inner_fn`.
    """
    x, delta, B, C, z = scan_inputs(
        xz,
        conv1d_weight,
        conv1d_bias,
        x_proj_weight,
        delta_proj_weight,
        A,
        B,
        C,
        B_proj_bias,
        C_proj_bias,
    )
    forward = selective_scan(x, delta, A, B, C, D, z, delta_bias, delta_softplus)
    backward = selective_scan(
        x.flip(-1),
        delta.flip(-1),
        A_b,
        _reversed(B, A),
        _reversed(C, A),
        D,
        z.flip(-1),
        delta_bias,
        delta_softplus,
    )
    out = forward + backward.flip(-1)
    return F.linear(out.mT.to(out_proj_weight.dtype), out_proj_weight, out_proj_bias)


def _reversed(coefficient: Tensor, A: Tensor) -> Tensor:
    """B or C from the end to the beginning; those that are the same at all steps stay."""
    if coefficient.dim() == 2:
        return coefficient
    if A.is_complex():  # pairs of real and imaginary part, which stay in order
        pairs: Tensor = coefficient.unflatten(-1, (-1, 2))
        return pairs.flip(-2).flatten(-2)
    return coefficient.flip(-1)
