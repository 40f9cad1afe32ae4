"""The angles of Mamba-3: sums over time of tanh(angle)·π·Δ, modulo 2π."""

import math

import torch
from torch import Tensor

from fuseport.ops.packed import Packed

__all__ = ["angle_dt_fwd"]


def angle_dt_fwd(
    angle: Tensor,
    dt: Tensor,
    init_state: Tensor | None = None,
    chunk_size: int = 64,
    return_output_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The sums at each step, computed in float64; b batch, l length, H heads, A angles.

    Args:
        angle: (b, l, H, A).
        dt: (b, H, l), Δ.
        init_state: (S, H, A), where sums begin; None for 0.
        chunk_size: has no effect on results.
        return_output_state: whether the last sums are returned too.
        cu_seqlens: (S + 1,), where packed sequences begin, and the last ends, for b = 1; or None.

    Returns:
        (b, l, H, A), angle's dtype; and (S, H, A).

    Raises:
        ValueError: there are packed sequences in more than one row.
    """
    steps = torch.tanh(angle).double() * dt.mT.double()[..., None] * math.pi
    total = steps.cumsum(1)
    begin = None if init_state is None else init_state.double()
    if cu_seqlens is None:
        sums = total if begin is None else total + begin[:, None]
        last = sums[:, -1]
    else:
        if angle.shape[0] != 1:
            raise ValueError(f"cu_seqlens: sequences are packed in one row; got {angle.shape[0]}")
        places = Packed.of(cu_seqlens, angle.shape[1])
        first = torch.arange(angle.shape[1], device=angle.device) - places.from_start
        sums = total - (total - steps)[:, first]
        if begin is not None:
            sums = sums + begin[places.sequence]
        ends = cu_seqlens[1:].long()
        last = sums[0, (ends - 1).clamp(min=0)]
        none = (ends == cu_seqlens[:-1])[:, None, None]
        last = torch.where(none, torch.zeros_like(last) if begin is None else begin, last)
    out = sums.remainder(2 * math.pi).to(angle.dtype)
    if return_output_state:
        return out, last.remainder(2 * math.pi).to(angle.dtype)
    return out
