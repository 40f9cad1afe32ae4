"""The ops of a decoding step as functions of states: new states come back, none is written to.

A program has no state that it could change, so these call the functional operators that are under
`fuseport.ops.causal_conv1d_update` and `fuseport.ops.selective_state_update`.
"""

import torch
from torch import Tensor, nn

from fuseport import ops

__all__ = ["advanced", "filtered"]


def filtered(
    x: Tensor, conv_state: Tensor, conv: nn.Conv1d, *, activated: bool = True
) -> tuple[Tensor, Tensor]:
    """The causal filter, with SiLU or not, at one token: (b, d), and the last inputs (b, d, W-1),
    anew."""
    ops.register("causal_conv1d_update")
    weight = conv.weight.squeeze(1)
    bias = weight.new_zeros(weight.shape[0]) if conv.bias is None else conv.bias
    out, new_state = torch.ops.fuseport.causal_conv1d_update(
        x.unsqueeze(2), conv_state, weight, bias, activated
    )
    return out.squeeze(2), new_state


def advanced(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor | None,
    dt_bias: Tensor,
    *,
    dt_softplus: bool = True,
) -> tuple[Tensor, Tensor]:
    """`selective_state_update` at one token: out, and the state after it.

    b batch, h heads, d channels, N states, g groups; without heads all of it is one head.

    Args:
        state: (b, [h,] d, N).
        x: (b, [h,] d).
        dt: like x.
        A: ([h,] d, N).
        B: (b, [g,] N).
        C: like B.
        D: ([h,] d).
        z: like x, or None.
        dt_bias: like D.
        dt_softplus: whether dt passes through softplus.
    """
    ops.register("selective_state_update")
    headed = state.dim() == 4
    if not headed:
        state, x, dt, B, C = (t.unsqueeze(1) for t in (state, x, dt, B, C))
        A, D, dt_bias = (t.unsqueeze(0) for t in (A, D, dt_bias))
        z = None if z is None else z.unsqueeze(1)
    operators = torch.ops.fuseport
    if z is None:
        out, new = operators.selective_state_update(state, x, dt, A, B, C, D, dt_bias, dt_softplus)
    else:
        out, new = operators.selective_state_update_gated(
            state, x, dt, A, B, C, D, z, dt_bias, dt_softplus
        )
    return (out, new) if headed else (out.squeeze(1), new.squeeze(1))
