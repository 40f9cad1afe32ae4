"""The calls of the causal-conv1d extension, over the registered ops."""

from typing import Any

import torch
from torch import Tensor

from fuseport.ops.causal_conv1d import causal_conv1d
from fuseport.ops.causal_conv1d_update import causal_conv1d_update

__all__ = ["bwd", "fwd", "update"]


def fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    final_states_out: Tensor | None = None,
    silu: bool = False,
) -> Tensor:
    """The convolution; the last inputs are written to `final_states_out` if that is given."""
    out, final_states = causal_conv1d(
        x, weight, bias, seq_idx, initial_states, True, "silu" if silu else None
    )
    if final_states_out is not None:
        final_states_out.copy_(final_states)
    return out


def bwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dout: Tensor,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    dfinal_states: Tensor | None = None,
    dx: Tensor | None = None,
    return_dinitial_states: bool = False,
    silu: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of x, weight, bias and initial_states; that of x is written to `dx` if given."""
    with torch.enable_grad():
        given = (x, weight, bias, initial_states)
        leaves: list[Any] = [None if t is None else t.detach().requires_grad_() for t in given]
        results: Any = causal_conv1d(
            leaves[0],
            leaves[1],
            leaves[2],
            seq_idx,
            leaves[3],
            True,
            "silu" if silu else None,
        )
        cotangents = [dout] if dfinal_states is None else [dout, dfinal_states]
        wanted = [leaf for leaf in leaves if leaf is not None]
        found = iter(torch.autograd.grad(results[: len(cotangents)], wanted, cotangents))
    of_x, of_weight, of_bias, of_states = (None if t is None else next(found) for t in leaves)
    assert of_x is not None
    assert of_weight is not None
    of_x = of_x if dx is None else dx.copy_(of_x)
    return of_x, of_weight, of_bias, of_states if return_dinitial_states else None


def update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    silu: bool = False,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """A decoding step; `conv_state_indices`, (b,), says which rows of the state are meant."""
    activation = "silu" if silu else None
    if conv_state_indices is None:
        return causal_conv1d_update(x, conv_state, weight, bias, activation, cache_seqlens)
    rows = conv_state_indices.long()
    state = conv_state[rows]
    out = causal_conv1d_update(x, state, weight, bias, activation, cache_seqlens)
    conv_state[rows] = state
    return out
