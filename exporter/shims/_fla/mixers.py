"""The mixers of fla that are recurrences over time: delta rules, and decays that are a head's."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.ops.gated_delta_rule import gated_delta_rule
from fuseport.ops.ssd_chunk_scan import ssd_chunk_scan

__all__ = ["FUNCTIONS"]

_Pair = tuple[Tensor, Tensor | None]
_WAYS = ("chunk", "fused_recurrent")


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    transpose_state_layout: bool = False,
) -> _Pair:
    """The op, which has fla's layouts; without a gate for g None.

    Args:
        q: (b, l, G, K).
        k: (b, l, G, K).
        v: (b, l, H, V).
        g: (b, l, H), or (b, l, H, K) as KDA's; None for no decay, or for `gk` alone.
        gk: (b, l, H, K), a decay beside g.
        beta: (b, l, H), or None for ones.
        use_gate_in_kernel: g is what `head_gate` or `channel_gate` takes.
        use_beta_sigmoid_in_kernel: beta passes through a sigmoid.
        allow_neg_eigval: and is doubled then.
        state_v_first: states are (b, H, V, K), not (b, H, K, V); once `transpose_state_layout`.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    if g is not None and use_gate_in_kernel:
        g = _gate(g, A_log, dt_bias, lower_bound)
    if gk is not None:
        g = gk if g is None else g.unsqueeze(3) + gk
    if g is None:
        g = torch.zeros(v.shape[:3], dtype=wide, device=v.device)
    if beta is None:
        beta = torch.ones(v.shape[:3], dtype=wide, device=v.device)
    elif beta.dim() == 4:
        raise NotImplementedError("with a beta of each channel of v: it has to be one of each head")
    if use_beta_sigmoid_in_kernel:
        beta = beta.to(wide).sigmoid() * (2 if allow_neg_eigval else 1)
    turned = state_v_first or transpose_state_layout
    out, state = gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        scale,
        initial_state.mT if turned and initial_state is not None else initial_state,
        output_final_state,
        use_qk_l2norm_in_kernel,
    )
    return out, state.mT if turned and state is not None else state


def _gate(
    g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None
) -> Tensor:
    if g.dim() == 4:
        return channel_gate(g, A_log, dt_bias, lower_bound)
    if A_log is None or lower_bound is not None:
        raise NotImplementedError("with a gate of heads that has a lower bound, or no A_log")
    return head_gate(g, A_log, dt_bias)


def head_gate(
    g: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """-exp(A_log)·softplus(g + dt_bias), the logarithm of a head's decay.

    Args:
        g: (…, H).
        A_log: as many numbers as heads, in any shape.
        dt_bias: as many, or None.
        output_dtype: of the result, or wider.
    """
    value = _biased(g, dt_bias, (-1,))
    rate = A_log.reshape(-1).to(value.dtype).exp()
    return -rate * F.softplus(value)


def channel_gate(
    g: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The same for each key channel; with `lower_bound` it is that times sigmoid(exp(A_log)·(g +
    dt_bias)).

    Args:
        g: (…, H, K).
        A_log: as many numbers as heads, in any shape; None for zeros.
        dt_bias: H·K numbers, or None.
        lower_bound: negative, or None.
        output_dtype: of the result, or wider.
    """
    value = _biased(g, dt_bias, g.shape[-2:])
    rate = A_log.reshape(-1, 1).to(value.dtype).exp() if A_log is not None else 1.0
    if lower_bound is None:
        return -rate * F.softplus(value)
    return lower_bound * torch.sigmoid(rate * value)


def _biased(g: Tensor, bias: Tensor | None, shape: Sequence[int]) -> Tensor:
    value = g.to(torch.promote_types(g.dtype, torch.float32))
    return value if bias is None else value + bias.to(value.dtype).reshape(shape)


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
) -> _Pair:
    """Linear attention whose decay is one number of each head, S_t = exp(g_t)·S_{t-1} + k_t v_tᵀ.

    With decays that are the same at all steps it is the scan of Mamba-2 with steps of 1, the op;
    with others `_of_pairs`.

    Args:
        q: (b, l, H, K).
        k: (b, l, H, K).
        v: (b, l, H, V).
        g: (b, l, H), the decay's logarithm at each step.
        g_gamma: (H,), the same at all steps; None for no decay, unless there is g.
        scale: of q; K**-0.5 for None.
        initial_state: (b, H, K, V), or (b, H, V, K) with `state_v_first`.
        cu_seqlens: (n + 1,), where packed sequences begin, and the end: without states and g.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    turned = state_v_first or transpose_state_layout
    if cu_seqlens is not None and not (g is None and initial_state is None):
        raise NotImplementedError("with cu_seqlens, and g or states: packed sequences have neither")
    if cu_seqlens is not None and output_final_state:
        raise NotImplementedError("with cu_seqlens for the final states, one for each sequence")
    if initial_state is not None:
        initial_state = (initial_state.mT if turned else initial_state).to(wide)
    q = q * (q.shape[3] ** -0.5 if scale is None else scale)
    if g is not None:
        g = g.to(wide) if g_gamma is None else g.to(wide) + g_gamma
        out, state = _of_pairs(q, k, v, g, initial_state)
    else:
        out, state = _of_scan(q, k, v, g_gamma, initial_state, cu_seqlens)
    if not output_final_state:
        return out, None
    return out, state.mT if turned else state


def _of_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None,
    initial: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    heads, sequences = v.shape[2], None
    if decay is None:
        decay = torch.zeros(heads, dtype=wide, device=q.device)
    if cu_seqlens is not None:
        steps = torch.arange(q.shape[1], device=q.device)
        sequences = torch.bucketize(steps, cu_seqlens[1:-1], right=True).int().unsqueeze(0)
    out, states = ssd_chunk_scan(
        v,
        torch.ones(v.shape[:3], dtype=v.dtype, device=v.device),
        decay.reshape(heads),
        k,
        q,
        initial_states=None if initial is None else initial.mT,
        seq_idx=sequences,
        return_final_states=True,
    )
    return out, states.mT


def _of_pairs(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Of all pairs of steps, as attention: q_iᵀ k_j weighs exp(g_{j+1} + … + g_i)."""
    wide = g.dtype
    query, key, value = (t.to(wide) for t in (q, k, v))
    total = g.cumsum(1).transpose(1, 2)
    spans = total.unsqueeze(3) - total.unsqueeze(2)
    steps = torch.arange(q.shape[1], device=q.device)
    later = steps > steps.unsqueeze(1)
    weights = torch.einsum("bihk,bjhk->bhij", query, key) * spans.masked_fill(later, -_INF).exp()
    out = torch.einsum("bhij,bjhv->bihv", weights, value)
    rest = (total[..., -1:] - total).exp()
    state = torch.einsum("bhj,bjhk,bjhv->bhkv", rest, key, value)
    if initial is not None:
        out = out + torch.einsum("bihk,bhi,bhkv->bihv", query, total.exp(), initial)
        state = state + total[..., -1].exp()[..., None, None] * initial
    return out.to(v.dtype), state


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
) -> _Pair:
    """`simple_gla` whose head h decays by 1 - 2^(-5-h) at each step."""
    heads = torch.arange(q.shape[2], dtype=torch.float32, device=q.device)
    decay = (1 - 2.0 ** (-5.0 - heads)).log()
    state = (initial_state, output_final_state, state_v_first, transpose_state_layout)
    return simple_gla(q, k, v, None, decay, scale, *state, cu_seqlens)


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
) -> _Pair:
    """`simple_gla` whose head h of H decays by exp(-8h/H·(1 - layer_idx/num_layers))."""
    heads = torch.arange(q.shape[2], dtype=torch.float32, device=q.device)
    decay = -(8 / q.shape[2] * (1 - layer_idx / num_layers)) * heads
    state = (initial_state, output_final_state)
    return simple_gla(q, k, v, None, decay, scale, *state, cu_seqlens=cu_seqlens)


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


_INF = float("inf")

FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{f"{way}_{name}": delta_rule for way in _WAYS for name in ("delta_rule", "gdn", "kda")},
    **{f"{way}_gated_delta_rule": delta_rule for way in _WAYS},
    "fused_gdn_gate": head_gate,
    "fused_kda_gate": channel_gate,
    **{f"{way}_simple_gla": simple_gla for way in (*_WAYS, "fused_chunk", "parallel")},
    **{f"{way}_retention": retention for way in (*_WAYS, "fused_chunk", "parallel")},
    **{f"{way}_lightning_attn": lightning for way in _WAYS},
    "normalize_with_z_state": divided_by_keys,
}
