"""Stands in for `causal_conv1d_cuda`, the extension of Dao-AILab/causal-conv1d.

Its calls grew with its versions, from 1.0 to 1.7: the number of arguments tells which is meant.
"""

from typing import Any

from torch import Tensor

from fuseport.exporter.shims import _conv

__all__ = ["causal_conv1d_bwd", "causal_conv1d_fwd", "causal_conv1d_update"]


def causal_conv1d_fwd(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor | None:
    """The convolution.

    After x, weight and bias come: `silu` (1.0); `seq_idx, silu` (1.1); `seq_idx, initial_states,
    final_states_out, silu` (from 1.2); `seq_idx, initial_states, out, final_states_out, silu` (from
    1.5), which writes to `out` and returns nothing.
    """
    if len(rest) == 5:
        seq_idx, initial_states, out, final_states_out, silu = rest
        out.copy_(_conv.fwd(x, weight, bias, seq_idx, initial_states, final_states_out, silu))
        return None
    *between, silu = rest
    names = ("seq_idx", "initial_states", "final_states_out")
    return _conv.fwd(x, weight, bias, silu=silu, **dict(zip(names, between, strict=False)))


def causal_conv1d_bwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, dout: Tensor, *rest: Any
) -> tuple[Tensor | None, ...] | None:
    """Gradients of x, weight and bias, and of initial_states from 1.2 on.

    After dout come: `dx, silu` (1.0); `seq_idx, dx, silu` (1.1); `seq_idx, initial_states,
    dfinal_states, dx, return_dinitial_states, silu` (from 1.2); `seq_idx, initial_states,
    dfinal_states, dx, dweight, dbias, dinitial_states, silu` (from 1.5), which writes.
    """
    if len(rest) == 8:
        seq_idx, initial_states, dfinal_states, dx, dweight, dbias, dinitial, silu = rest
        states = (seq_idx, initial_states, dfinal_states)
        targets = (dx, dweight, dbias, dinitial)
        wanted = dinitial is not None
        found = _conv.bwd(x, weight, bias, dout, *states, None, wanted, silu)
        for target, gradient in zip(targets, found, strict=True):
            if target is not None and gradient is not None:
                target.copy_(gradient)
        return None
    if len(rest) == 6:
        return _conv.bwd(x, weight, bias, dout, *rest)
    *before, dx, silu = rest
    seq_idx = before[0] if before else None
    return _conv.bwd(x, weight, bias, dout, seq_idx, dx=dx, silu=silu)[:3]


def causal_conv1d_update(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any
) -> Tensor | None:
    """A decoding step, conv_state updated in place.

    After bias come: `silu`, from 1.3 `silu, cache_seqlens`, from 1.4 `silu, cache_seqlens,
    conv_state_indices`; from 1.5 `out` stands before these, is written to, and nothing returned.
    """
    if rest and isinstance(rest[0], Tensor):
        out, *rest_ = rest
        out.copy_(_conv.update(x, conv_state, weight, bias, *rest_))
        return None
    return _conv.update(x, conv_state, weight, bias, *rest)
