"""The state update in plain torch: what the kernels are held against.

Any device, and any dtype that the op takes; in float64 it is the truth of a verification.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.ops.selective_state_update.shapes import check

__all__ = ["selective_state_update", "selective_state_update_gated"]


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    dt_softplus: bool,
) -> tuple[Tensor, Tensor]:
    """out, (b, h, d), and new_state, (b, h, d, N)."""
    check("selective_state_update", state, x, dt, A, B, C, D, None, dt_bias)
    return _update(state, x, dt, A, B, C, D, None, dt_bias, dt_softplus)


def selective_state_update_gated(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor,
    dt_bias: Tensor,
    dt_softplus: bool,
) -> tuple[Tensor, Tensor]:
    """The same, with out multiplied by SiLU(z)."""
    check("selective_state_update_gated", state, x, dt, A, B, C, D, z, dt_bias)
    return _update(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus)


def _update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor | None,
    dt_bias: Tensor,
    dt_softplus: bool,
) -> tuple[Tensor, Tensor]:
    wide = A.dtype
    heads = x.shape[1]
    u = x.to(wide)
    step = dt.to(wide) + dt_bias
    if dt_softplus:
        step = F.softplus(step, threshold=20.0)
    inflow = (step * u)[..., None] * _per_head(B, heads, wide)
    new_state = torch.exp(step[..., None] * A) * state.to(wide) + inflow
    out = (new_state * _per_head(C, heads, wide)).sum(-1) + D * u
    if z is not None:
        out = out * F.silu(z.to(wide))
    return _contiguous(out.to(x.dtype)), _contiguous(new_state.to(state.dtype))


def _per_head(coefficient: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """B or C as (b, h, 1, N)."""
    groups = coefficient.shape[1]
    return coefficient.to(dtype).repeat_interleave(heads // groups, dim=1)[:, :, None]


def _contiguous(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format)
