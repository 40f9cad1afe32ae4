"""The rotation of queries and keys at one step of decoding by Mamba-3."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.ops.rotary_embedding import rotary_embedding

__all__ = ["apply_rotary_qk_inference_fwd", "apply_rotary_qk_inference_reference"]


def apply_rotary_qk_inference_fwd(
    q: Tensor,
    k: Tensor,
    angle_state: Tensor,
    angle_proj: Tensor,
    dt: Tensor,
    bias_q: Tensor | None = None,
    bias_k: Tensor | None = None,
    inplace: bool = False,
    conjugate: bool = False,
    rotate_pairwise: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """q and k with their biases, turned by angle_state + tanh(angle_proj)·π·Δ; b batch, R ranks, H
    heads of N channels, A angles.

    Args:
        q: (b, R, H, N), in any layout.
        k: like q.
        angle_state: (b, H, A), A ≤ N/2.
        angle_proj: (b, H, A).
        dt: (b, H), Δ.
        bias_q: (R, H, N), or None.
        bias_k: like bias_q.
        inplace: whether q, k and angle_state are written to, and returned.
        conjugate: whether it is turned by the negative angles.
        rotate_pairwise: channels 2i and 2i + 1 are turned by angle i; else i and i + N/2.

    Returns:
        Both turned, and the new angles, which are no remainder.
    """
    wide = torch.promote_types(angle_state.dtype, torch.float32)
    steps = torch.tanh(angle_proj.to(wide)) * (math.pi * dt.to(wide))[..., None]
    angle = angle_state.to(wide) + steps
    cos, sin = angle.cos(), angle.sin()
    sin = -sin if conjugate else sin
    rest = q.shape[-1] // 2 - angle.shape[-1]
    if not rotate_pairwise and rest:
        cos, sin = F.pad(cos, (0, rest), value=1.0), F.pad(sin, (0, rest))

    def turned(x: Tensor, bias: Tensor | None) -> Tensor:
        biased = x.to(wide) if bias is None else x.to(wide) + bias.to(wide)
        return rotary_embedding(biased, cos, sin, rotate_pairwise).to(x.dtype)

    out = (turned(q, bias_q), turned(k, bias_k), angle.to(angle_state.dtype))
    if not inplace:
        return out
    return q.copy_(out[0]), k.copy_(out[1]), angle_state.copy_(out[2])


def apply_rotary_qk_inference_reference(
    q: Tensor,
    k: Tensor,
    angle_state: Tensor,
    angle_proj: Tensor,
    dt: Tensor,
    bias_q: Tensor | None = None,
    bias_k: Tensor | None = None,
    conjugate: bool = False,
    rotate_pairwise: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """`apply_rotary_qk_inference_fwd`, which is the same here."""
    given = (q, k, angle_state, angle_proj, dt, bias_q, bias_k)
    return apply_rotary_qk_inference_fwd(*given, False, conjugate, rotate_pairwise)
