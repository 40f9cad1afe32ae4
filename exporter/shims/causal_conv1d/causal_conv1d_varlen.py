"""The states of packed sequences, as `causal_conv1d.causal_conv1d_varlen` has them."""

import torch
from torch import Tensor

__all__ = ["causal_conv1d_varlen_states", "causal_conv1d_varlen_states_ref"]


def causal_conv1d_varlen_states(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    """The last `state_len` inputs of each packed sequence, zeros before its first: (b, d, s).

    Args:
        x: (all steps, d).
        cu_seqlens: (b + 1,), where each sequence begins, and the end of the last.
        state_len: s.
    """
    starts, ends = cu_seqlens[:-1, None].long(), cu_seqlens[1:, None].long()
    steps = ends - torch.arange(state_len, 0, -1, device=x.device)
    states = x[steps.clamp(min=0)] * (steps >= starts)[..., None].to(x.dtype)
    return states.transpose(1, 2)


causal_conv1d_varlen_states_ref = causal_conv1d_varlen_states
