"""The gated delta rule in plain torch, step by step: what the kernels are held against.

Any device, and any dtype that the op takes; in float64 it is the truth of a verification. Forward
is differentiable by autograd. Backward is stated explicitly, because autograd cannot be called
inside a registered operator. With S', S and the names of the public docstring, with
e_t = v_t - S'_tᵀ k_t and u_t = β_t e_t, and with D_t the cotangent of S_t, from the last step on:

    D_t = exp(g_{t+1}) D'_{t+1} + scale·q_t dout_tᵀ, where D after the last step is dfinal_state
    dq_t = scale·S_t dout_t         du_t = D_tᵀ k_t         dk_t = D_t u_t - S'_t (β_t du_t)
    dv_t = β_t du_t                 dβ_t = du_t·e_t         D'_t = D_t - k_t (β_t du_t)ᵀ
    dg_t = Σ_V S'_t D'_t, for each key channel; summed over these, too, where the decay is a head's
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from fuseport.ops.delta_rules import check_backward
from fuseport.ops.gated_delta_rule.shapes import check

__all__ = ["gated_delta_rule", "gated_delta_rule_backward"]


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """out, (b, l, H, V), and final_state, (b, H, K, V)."""
    check("gated_delta_rule", q, k, v, g, beta, initial_state)
    state, outs = initial_state, []
    for query, key, value, decay, rate in _steps(q, k, v, g, beta):
        decayed = decay * state
        state = torch.addcmul(decayed, key, rate * (value - key.mT @ decayed))
        outs.append(scale * (query.mT @ state).squeeze(2))
    out = torch.stack(outs, 1) if outs else v
    return _contiguous(out.to(v.dtype)), _contiguous(state)


def gated_delta_rule_backward(
    dout: Tensor,
    dfinal_state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    scale: float,
) -> tuple[Tensor, ...]:
    """(dq, dk, dv, dg, dbeta, dinitial_state), each like its input."""
    op = "gated_delta_rule_backward"
    check(op, q, k, v, g, beta, initial_state)
    check_backward(op, dout, dfinal_state, q, v)
    steps = list(_steps(q, k, v, g, beta))
    state, before = initial_state, []
    for _, key, value, decay, rate in steps:
        before.append(state)
        decayed = decay * state
        state = torch.addcmul(decayed, key, rate * (value - key.mT @ decayed))

    later, gradients = dfinal_state, []
    cotangents = dout.to(initial_state.dtype).unsqueeze(3).unbind(1)
    for step, cotangent, earlier in zip(
        reversed(steps), reversed(cotangents), reversed(before), strict=True
    ):
        query, key, value, decay, rate = step
        decayed = decay * earlier
        error = value - key.mT @ decayed
        update = rate * error
        dstate = torch.addcmul(later, scale * query, cotangent)
        dupdate = key.mT @ dstate
        dvalue = rate * dupdate
        ddecayed = torch.addcmul(dstate, key, dvalue, value=-1)
        of_state = torch.addcmul(decayed, key, update)
        gradients.append(
            (
                scale * (of_state @ cotangent.mT).squeeze(3),
                (dstate @ update.mT - decayed @ dvalue.mT).squeeze(3),
                dvalue.squeeze(2),
                (decayed * ddecayed).sum(3),
                (dupdate * error).sum((2, 3)),
            )
        )
        later = decay * ddecayed
    if not gradients:
        zeros = tuple(torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
        return (*zeros, _contiguous(g), _contiguous(beta), _contiguous(later))
    dq, dk, dv, dg, dbeta = (torch.stack(parts[::-1], 1) for parts in zip(*gradients, strict=True))
    groups = (q.shape[2], v.shape[2] // q.shape[2])
    dq, dk = (t.unflatten(2, groups).sum(3) for t in (dq, dk))
    dg = dg.sum(3, keepdim=True) if g.shape[3] == 1 else dg
    found = (dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dg, dbeta, later)
    return tuple(map(_contiguous, found))


def _steps(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
) -> Iterator[tuple[Tensor, ...]]:
    """Of each step q and k, (b, H, K, 1), v, (b, H, 1, V), exp(g), (b, H, 1 or K, 1), and beta."""
    wide, size = g.dtype, v.shape[2] // q.shape[2]
    query, key = (t.to(wide).repeat_interleave(size, 2).unsqueeze(4) for t in (q, k))
    value, decay, rate = v.to(wide).unsqueeze(3), g.exp().unsqueeze(4), beta[..., None, None]
    # `unbind`, not an index per step: autograd would fill a whole zero tensor for each of those.
    yield from zip(*(t.unbind(1) for t in (query, key, value, decay, rate)), strict=True)


def _contiguous(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format)
