"""Mamba-3's scan of several queries and keys at each step, over the registered ops."""

import torch
from torch import Tensor

from fuseport.ops.compositions import mamba3

__all__ = ["mamba3_mimo"]


def mamba3_mimo(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    ADT: Tensor,
    DT: Tensor,
    Trap: Tensor,
    Q_bias: Tensor,
    K_bias: Tensor,
    MIMO_V: Tensor,
    MIMO_Z: Tensor | None,
    MIMO_Out: Tensor | None,
    Angles: Tensor,
    D: Tensor | None,
    Z: Tensor | None,
    chunk_size: int,
    rotary_dim_divisor: int,
    dtype: torch.dtype,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    fuse_pregate_headwise_rms_norm: bool = False,
    outproj_norm_weight: Tensor | None = None,
    outproj_norm_eps: float = 1e-5,
) -> Tensor | tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The composition, see `mamba3_mimo` there; in V's dtype, whatever `dtype` is."""
    return mamba3.mamba3_mimo(
        Q.to(V.dtype),
        K.to(V.dtype),
        V,
        ADT,
        DT,
        Trap,
        Q_bias,
        K_bias,
        MIMO_V,
        MIMO_Z,
        MIMO_Out,
        Angles,
        D,
        Z,
        chunk_size,
        rotary_dim_divisor,
        dtype,
        return_state,
        cu_seqlens,
        fuse_pregate_headwise_rms_norm,
        outproj_norm_weight,
        outproj_norm_eps,
    )
