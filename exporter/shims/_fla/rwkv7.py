"""RWKV-7 of fla: its delta rule, diagonal plus low rank, and what its layers fuse beside it."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.exporter.shims._dtypes import wide
from fuseport.exporter.shims._fla.packed import apart, refuse_states
from fuseport.ops.dplr_delta_rule import dplr_delta_rule
from fuseport.ops.packed import Packed

__all__ = ["FUNCTIONS"]

_Pair = tuple[Tensor, Tensor | None]
_WAYS = ("chunk", "fused_recurrent")


def diagonal_plus_low_rank(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    lower_bound: float | None = None,
) -> _Pair:
    """The op, which has fla's layouts.

    Args:
        q: (b, l, H, K).
        k: (b, l, H, K).
        v: (b, l, H, V).
        a: (b, l, H, K), what reads the state before a step.
        b: (b, l, H, K), what that is written with.
        gk: (b, l, H, K), the decay's logarithm.
        scale: of q; K**-0.5 for None.
        initial_state: (b, H, K, V).
        cu_seqlens: (n + 1,), where packed sequences begin, and the end: without states.
        lower_bound: of gk, as the caller says: it changes no value.
    """
    if cu_seqlens is not None:
        refuse_states(initial_state, output_final_state)
        gk = apart(gk, cu_seqlens)
        begins = Packed.of(cu_seqlens, a.shape[1]).begins()
        a = a.masked_fill(begins[:, None, None], 0.0)
    k, a, b = (t.to(q.dtype) for t in (k, a, b))
    out, state = dplr_delta_rule(
        q, k, v.to(q.dtype), a, b, gk, scale, initial_state, output_final_state
    )
    return out.to(v.dtype), state


def identity_plus_low_rank(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> _Pair:
    """`diagonal_plus_low_rank` without a decay."""
    states = (initial_state, output_final_state)
    return diagonal_plus_low_rank(q, k, v, a, b, torch.zeros_like(q), scale, *states, cu_seqlens)


def by_one_key(
    r: Tensor,
    w: Tensor,
    k: Tensor,
    v: Tensor,
    kk: Tensor,
    a: Tensor,
    scale: float | None = 1.0,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> _Pair:
    """`diagonal_plus_low_rank` that reads by -kk, and writes that by kk times rates, `a`.

    Args:
        r: (b, l, H, K), the queries.
        w: (b, l, H, K), the decay's logarithm.
        k: (b, l, H, K).
        v: (b, l, H, V).
        kk: (b, l, H, K).
        a: (b, l, H, K).
        scale: of r; K**-0.5 for None.
        initial_state: (b, H, K, V).
        cu_seqlens: (n + 1,), where packed sequences begin, and the end: without states.
    """
    real = wide(r)
    query, key, read, rate = (t.to(real) for t in (r, k, kk, a))
    states = (initial_state, output_final_state)
    out, state = diagonal_plus_low_rank(
        query, key, v.to(real), -read, read * rate, w, scale, *states, cu_seqlens
    )
    return out.to(v.dtype), state


def mixed(
    hidden_states: Tensor,
    delta: Tensor,
    xr: Tensor,
    xw: Tensor,
    xk: Tensor,
    xv: Tensor,
    xa: Tensor,
    xg: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """x + delta·m for six m, (1, 1, d), of which the last may be None: so is its result then."""
    parts = (xr, xw, xk, xv, xa, xg)
    return tuple(None if m is None else hidden_states.addcmul(delta, m) for m in parts)


def key_update(k: Tensor, a: Tensor, ka: Tensor) -> Tensor:
    """k·(1 + (a - 1)·ka), of k and rates, (b, l, d), and ka, (d,)."""
    return k.addcmul(k * (a - 1), ka)


def corrected(o: Tensor, r: Tensor, k: Tensor, r_k: Tensor, v: Tensor, g: Tensor) -> Tensor:
    """(o + Σ(r·k·r_k)·v)·g: what the mixer gave, with what a step has of itself, and gated.

    Args:
        o: (b, l, H·V).
        r: (b, l, H, K).
        k: (b, l, H, K).
        r_k: (H, K).
        v: (b, l, H, V).
        g: (b, l, H·V).
    """
    real = wide(o)
    query, key, bonus, value = (t.to(real) for t in (r, k, r_k, v))
    own = (query * key * bonus).sum(-1, keepdim=True) * value
    return ((o.to(real) + own.flatten(-2)) * g.to(real)).to(o.dtype)


def channel_mixing(
    x: Tensor, x_prev: Tensor, x_k: Tensor, key_weight: Tensor, value_weight: Tensor
) -> tuple[Tensor, Tensor]:
    """relu((x + (x_{t-1} - x)·x_k)·key_weight)²·value_weight, and the last entry of x.

    Args:
        x: (b, l, d).
        x_prev: (b, d) or (b, 1, d), the step before the first.
        x_k: (1, 1, d).
        key_weight: (d, n).
        value_weight: (n, d).
    """
    before = torch.cat([x_prev.reshape(x.shape[0], 1, x.shape[2]), x[:, :-1]], 1)
    hidden = x.addcmul(before - x, x_k) @ key_weight
    return F.relu(hidden).square() @ value_weight, x[-1, :]


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{f"{way}_dplr_delta_rule": diagonal_plus_low_rank for way in _WAYS},
    **{f"{way}_iplr_delta_rule": identity_plus_low_rank for way in _WAYS},
    "fused_mul_recurrent_rwkv7": by_one_key,
    "fused_addcmul_rwkv7": mixed,
    "fused_k_rwkv7": key_update,
    "gate_output_correction": corrected,
    "channel_mixing_rwkv7": channel_mixing,
}
