"""Mamba-3's scan of one query and key at each step, over the registered ops."""

from typing import NamedTuple

from torch import Tensor

from fuseport.ops.compositions.mamba3 import mamba3_siso

__all__ = ["Mamba3Output", "mamba3_siso_combined"]


class Mamba3Output(NamedTuple):
    """What a scan returns, by name."""

    out: Tensor
    final_angle_state: Tensor | None = None
    final_ssm_state: Tensor | None = None
    final_k_state: Tensor | None = None
    final_v_state: Tensor | None = None


def mamba3_siso_combined(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    ADT: Tensor,
    DT: Tensor,
    Trap: Tensor,
    Q_bias: Tensor,
    K_bias: Tensor,
    Angles: Tensor,
    D: Tensor | None = None,
    Z: Tensor | None = None,
    Input_States: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    chunk_size: int = 64,
    return_final_states: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The composition, see `mamba3_siso`; in V's dtype, where the extension rounds to bfloat16."""
    return mamba3_siso(
        Q.to(V.dtype),
        K.to(V.dtype),
        V,
        ADT,
        DT,
        Trap,
        Q_bias,
        K_bias,
        Angles,
        D,
        None if Z is None else Z.to(V.dtype),
        Input_States,
        chunk_size,
        return_final_states,
        cu_seqlens,
    )
