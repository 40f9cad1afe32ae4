"""The calls of CUDA selective scan extensions, over the registered op."""

import torch
from torch import Tensor

from fuseport.ops import registration
from fuseport.ops.selective_scan import SPEC, selective_scan
from fuseport.ops.selective_scan.shapes import CHUNK

__all__ = ["gated", "saved", "scan"]

_SAVED_STEPS = 2048  # the CUDA kernels save a state after each so many steps
_SOFTPLUS_THRESHOLD = 20.0


def scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
) -> tuple[Tensor, Tensor]:
    """The scan without a gate, and the states that its extension saves: `x`, see `saved`."""
    registration.ensure(SPEC)
    real = A.dtype.to_real() if A.is_complex() else A.dtype
    zeros = torch.zeros(u.shape[1:2], dtype=real, device=A.device)
    skip, bias = (zeros if t is None else t for t in (D, delta_bias))
    out, last, states = torch.ops.fuseport.selective_scan(
        u, delta, A, B, C, skip, bias, delta_softplus
    )
    return out, saved(delta, A, bias, delta_softplus, states, last)


def saved(
    delta: Tensor,
    A: Tensor,
    delta_bias: Tensor,
    delta_softplus: bool,
    states: Tensor,
    last: Tensor,
) -> Tensor:
    """What `fwd` returns as `x`: (b, d, ⌈l/2048⌉, 2N) of A's dtype, pairs after each 2048 steps.

    A pair is the product of all exp(δ̂ A) so far, and the state: the last state is
    `x[:, :, -1, 1::2]`, and differentiable.

    Args:
        delta: (b, d, l).
        A: (d, N).
        delta_bias: (d,).
        delta_softplus: whether delta + delta_bias passes through softplus.
        states: (b, c, N, d), the op's, before each chunk of 64 steps and after the last.
        last: (b, d, N), the last state.
    """
    length = delta.shape[2]
    wide = A.dtype.to_real() if A.is_complex() else A.dtype
    step = delta.to(wide) + delta_bias.to(wide)[:, None]
    if delta_softplus:
        step = torch.nn.functional.softplus(step, threshold=_SOFTPLUS_THRESHOLD)
    numbers = torch.arange((length + _SAVED_STEPS - 1) // _SAVED_STEPS, device=delta.device) + 1
    ends = (numbers * _SAVED_STEPS).clamp(max=length)
    elapsed = step.cumsum(2).index_select(2, ends - 1)
    product = torch.exp(elapsed[..., None] * A[:, None, :])
    at = ((ends + CHUNK - 1) // CHUNK).clamp(max=states.shape[1] - 1)
    every = torch.cat([states[:, :-1].transpose(2, 3), last.unsqueeze(1)], 1)
    state = every.index_select(1, at).transpose(1, 2)
    # No casts of what is computed here: export guards a cast's input, and so would keep the op
    # whose results nobody takes.
    return torch.stack([product, state], -1).flatten(3)


def gated(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    delta_bias: Tensor | None,
    delta_softplus: bool,
) -> Tensor:
    """The op with its gate where there is one, its result alone."""
    out: Tensor = selective_scan(
        u, delta, A, B, C, D, z=z, delta_bias=delta_bias, delta_softplus=delta_softplus
    )
    return out
