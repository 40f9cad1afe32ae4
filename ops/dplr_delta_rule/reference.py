"""The rule in plain torch, step by step: what the kernels are held against.

Any device, and any dtype that the op takes; in float64 it is the truth of a verification. Forward
is differentiable by autograd. Backward is stated explicitly, because autograd cannot be called
inside a registered operator. With the names of the public docstring, w_t = exp(log_decay_t) and
z_t = S_{t-1}ᵀ a_t, and with D_t the cotangent of S_t, from the last step on:

    D_t = w_{t+1} D_{t+1} + a_{t+1} dz_{t+1}ᵀ + scale·q_t dout_tᵀ, after the last step dfinal_state
    dq_t = scale·S_t dout_t         dk_t = D_t v_t          dv_t = D_tᵀ k_t
    dz_t = D_tᵀ b_t                 db_t = D_t z_t          da_t = S_{t-1} dz_t
    dlog_decay_t = w_t Σ_V S_{t-1} D_t, for each key channel
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from fuseport.ops.delta_rules import check_backward
from fuseport.ops.dplr_delta_rule.shapes import check

__all__ = ["dplr_delta_rule", "dplr_delta_rule_backward"]


def dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    log_decay: Tensor,
    initial_state: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """out, (n, l, H, V), and final_state, (n, H, K, V)."""
    check("dplr_delta_rule", q, k, v, a, b, log_decay, initial_state)
    state, outs = initial_state, []
    for query, key, value, reading, writing, decay in _steps(q, k, v, a, b, log_decay):
        state = decay * state + writing * (reading.mT @ state) + key * value
        outs.append(scale * (query.mT @ state).squeeze(2))
    out = torch.stack(outs, 1) if outs else v
    return _contiguous(out.to(v.dtype)), _contiguous(state)


def dplr_delta_rule_backward(
    dout: Tensor,
    dfinal_state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    log_decay: Tensor,
    initial_state: Tensor,
    scale: float,
) -> tuple[Tensor, ...]:
    """(dq, dk, dv, da, db, dlog_decay, dinitial_state), each like its input."""
    op = "dplr_delta_rule_backward"
    check(op, q, k, v, a, b, log_decay, initial_state)
    check_backward(op, dout, dfinal_state, q, v)
    steps = list(_steps(q, k, v, a, b, log_decay))
    states = [initial_state]
    for _, key, value, reading, writing, decay in steps:
        state = states[-1]
        states.append(decay * state + writing * (reading.mT @ state) + key * value)

    dstate, gradients = dfinal_state, []
    cotangents = dout.to(initial_state.dtype).unsqueeze(3).unbind(1)
    for i in range(len(steps) - 1, -1, -1):
        query, key, value, reading, writing, decay = steps[i]
        before, after = states[i], states[i + 1]
        dstate = torch.addcmul(dstate, scale * query, cotangents[i])
        dread = writing.mT @ dstate
        gradients.append(
            (
                scale * (after @ cotangents[i].mT).squeeze(3),
                (dstate @ value.mT).squeeze(3),
                (key.mT @ dstate).squeeze(2),
                (before @ dread.mT).squeeze(3),
                (dstate @ (reading.mT @ before).mT).squeeze(3),
                decay.squeeze(3) * (before * dstate).sum(3),
            )
        )
        dstate = decay * dstate + reading * dread
    if not gradients:
        inputs = (q, k, v, a, b, log_decay)
        zeros = tuple(torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in inputs)
        return (*zeros, _contiguous(dstate))
    found = [torch.stack(parts[::-1], 1) for parts in zip(*gradients, strict=True)]
    return (*(_contiguous(t.to(q.dtype)) for t in found[:5]), *map(_contiguous, (found[5], dstate)))


def _steps(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, log_decay: Tensor
) -> Iterator[tuple[Tensor, ...]]:
    """Of each step q and k, (n, H, K, 1), v, (n, H, 1, V), and as q a, b and the decay."""
    wide = log_decay.dtype
    query, key, reading, writing = (t.to(wide).unsqueeze(4) for t in (q, k, a, b))
    value, decay = v.to(wide).unsqueeze(3), log_decay.exp().unsqueeze(4)
    # `unbind`, not an index per step: autograd would fill a whole zero tensor for each of those.
    every = (query, key, value, reading, writing, decay)
    yield from zip(*(t.unbind(1) for t in every), strict=True)


def _contiguous(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format)
