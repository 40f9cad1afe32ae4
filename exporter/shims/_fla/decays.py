"""The mixers of fla whose states decay: linear attention, of one decay or another."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.exporter.shims._dtypes import wide
from fuseport.exporter.shims._fla.packed import apart, numbers, refuse_states
from fuseport.ops.dplr_delta_rule import dplr_delta_rule
from fuseport.ops.ssd_chunk_scan import ssd_discrete

__all__ = ["FUNCTIONS"]

_Pair = tuple[Tensor, Tensor | None]
_WAYS = ("chunk", "fused_recurrent")


def simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    transpose_state_layout: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
) -> _Pair:
    """Linear attention whose decay is one number of each head, S_t = exp(g_t)·S_{t-1} + k_t v_tᵀ.

    Args:
        q: (b, l, H, K).
        k: (b, l, H, K).
        v: (b, l, H, V).
        g: (b, l, H), the decay's logarithm at each step.
        g_gamma: (H,), the same at all steps; None for no decay, unless there is g.
        scale: of q; K**-0.5 for None.
        initial_state: (b, H, K, V), or (b, H, V, K) with `state_v_first`.
        cu_seqlens: (n + 1,), where packed sequences begin, and the end: without states.
        chunk_size: of fla's kernels, which changes no value: a power of 2.
    """
    if chunk_size is not None and (chunk_size < 1 or chunk_size & (chunk_size - 1)):
        raise ValueError(f"chunk_size is {chunk_size}, and fla takes powers of 2")
    if cu_seqlens is not None:
        refuse_states(initial_state, output_final_state)
    real, turned, sequences = wide(q), state_v_first or transpose_state_layout, None
    decay = torch.zeros(v.shape[:3], dtype=real, device=v.device)
    for logarithm in (g, g_gamma):
        decay = decay if logarithm is None else decay + logarithm.to(real)
    if initial_state is not None and not turned:
        initial_state = initial_state.mT
    if cu_seqlens is not None:
        sequences = numbers(cu_seqlens, q.shape[1])
    query, key = (t.to(v.dtype) for t in (_scaled(q, scale), k))
    out, state = ssd_discrete(v, decay, key, query, None, initial_state, sequences)
    if not output_final_state:
        return out, None
    return out, state if turned else state.mT


def gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    transpose_state_layout: bool = False,
    cu_seqlens: Tensor | None = None,
) -> _Pair:
    """Linear attention whose decay is one number of each key channel and step.

    Args:
        q: (b, l, H, K).
        k: (b, l, H, K).
        v: (b, l, H, V).
        g: (b, l, H, K), the decay's logarithm; it may be called `gk`. None for no decay.
        scale: of q; K**-0.5 for None.
        initial_state: (b, H, K, V), or (b, H, V, K) with `state_v_first`.
        cu_seqlens: (n + 1,), where packed sequences begin, and the end: without states.
    """
    turned = state_v_first or transpose_state_layout
    decay = gk if g is None else g
    if decay is None:
        decay = torch.zeros_like(k)
    if cu_seqlens is not None:
        refuse_states(initial_state, output_final_state)
        decay = apart(decay, cu_seqlens)
    if turned and initial_state is not None:
        initial_state = initial_state.mT
    out, state = _of_channels(_scaled(q, scale), k, v, decay, initial_state)
    if not output_final_state:
        return out, None
    return out, state.mT if turned else state


def rwkv6(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
) -> _Pair:
    """RWKV-6's mixer, o_t = r_tᵀ(S_{t-1} + (u ∘ k_t) v_tᵀ) with S_t = exp(w_t)·S_{t-1} + k_t v_tᵀ.

    Source: B. Peng et al., "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic
    Recurrence", 2024, of Finch.

    Args:
        r: (b, l, H, K).
        k: (b, l, H, K).
        v: (b, l, H, V).
        w: (b, l, H, K), the decay's logarithm.
        u: (H, K), of the step itself.
        scale: of r; K**-0.5 for None.
        initial_state: (b, H, K, V).
    """
    query, value = _scaled(r, scale), v.to(wide(v))
    # With a step of nothing at the front, each finds the state before it, and one more the last.
    key, added, decay = (F.pad(t, (0, 0, 0, 0, 1, 0)) for t in (k, value, w))
    read = F.pad(query, (0, 0, 0, 0, 0, 1))
    out, state = _of_channels(read, key, added, decay, initial_state)
    out = out[:, :-1] + (query * u * k).sum(-1, keepdim=True) * value
    return out.to(v.dtype), state if output_final_state else None


def hgrn(
    x: Tensor,
    g: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> _Pair:
    """HGRN's mixer, h_t = exp(g_t)·h_{t-1} + x_t, each channel by itself: a head of one number.

    Args:
        x: (b, l, d).
        g: (b, l, d), the decay's logarithm.
        initial_state: (b, d).
        cu_seqlens: (n + 1,), where packed sequences begin, and the end: without states.
    """
    sequences = None
    if cu_seqlens is not None:
        refuse_states(initial_state, output_final_state)
        sequences = numbers(cu_seqlens, x.shape[1])
    one = torch.ones((*x.shape[:2], 1, 1), dtype=x.dtype, device=x.device)
    state = None if initial_state is None else initial_state[:, :, None, None]
    out, last = ssd_discrete(x.unsqueeze(3), g.to(wide(x)), one, one, None, state, sequences)
    return out.squeeze(3), last[:, :, 0, 0] if output_final_state else None


def _of_channels(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial: Tensor | None
) -> tuple[Tensor, Tensor]:
    """S_t = exp(g_t)·S_{t-1} + k_t v_tᵀ: the delta rule of RWKV-7 that reads nothing."""
    real = wide(q)
    query, key, value = (t.to(real) for t in (q, k, v))
    nothing = torch.zeros_like(key)
    out, state = dplr_delta_rule(query, key, value, nothing, nothing, g, 1.0, initial, True)
    assert state is not None
    return out.to(v.dtype), state


def _scaled(q: Tensor, scale: float | None) -> Tensor:
    return q.to(wide(q)) * (q.shape[3] ** -0.5 if scale is None else scale)


def retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    transpose_state_layout: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
) -> _Pair:
    """`simple_gla` whose head h decays by 1 - 2^(-5-h) at each step."""
    heads = torch.arange(q.shape[2], dtype=torch.float32, device=q.device)
    decay = (1 - 2.0 ** (-5.0 - heads)).log()
    state = (initial_state, output_final_state, state_v_first, transpose_state_layout)
    return simple_gla(q, k, v, None, decay, scale, *state, cu_seqlens, chunk_size)


def lightning(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
) -> _Pair:
    """`simple_gla` whose head h of H decays by exp(-8h/H·(1 - layer_idx/num_layers))."""
    heads = torch.arange(q.shape[2], dtype=torch.float32, device=q.device)
    decay = -(8 / q.shape[2] * (1 - layer_idx / num_layers)) * heads
    state = (initial_state, output_final_state, False, False)
    return simple_gla(q, k, v, None, decay, scale, *state, cu_seqlens, chunk_size)


def divided_by_keys(
    o: Tensor,
    q: Tensor,
    k: Tensor,
    scale: float,
    z_init: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """o_t / (scale·q_tᵀ Σ_{s≤t} k_s), and the sum of all keys, (b, 1, H, K)."""
    keys = k.cumsum(1) if z_init is None else k.cumsum(1) + z_init
    return o / ((q * scale * keys).sum(-1, keepdim=True) + 1e-10), keys[:, -1:]


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{f"{way}_gla": gla for way in _WAYS},
    **{f"{way}_simple_gla": simple_gla for way in (*_WAYS, "fused_chunk", "parallel")},
    **{f"{way}_retention": retention for way in (*_WAYS, "fused_chunk", "parallel")},
    **{f"{way}_lightning_attn": lightning for way in _WAYS},
    **{f"{way}_rwkv6": rwkv6 for way in _WAYS},
    **{f"{way}_hgrn": hgrn for way in _WAYS},
    "normalize_with_z_state": divided_by_keys,
}
