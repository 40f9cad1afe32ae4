"""The delta rules of fla, with their gates."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.exporter.shims._dtypes import wide
from fuseport.exporter.shims._fla.packed import apart, refuse_states
from fuseport.ops.gated_delta_rule import gated_delta_rule

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
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
    *,
    chunk_sizes: Collection[int] = (16, 32, 64),
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
        cu_seqlens: (n + 1,), where packed sequences begin, and the end: without states.
        chunk_size: of fla's kernels, which changes no value.
        chunk_sizes: those that fla takes.
    """
    if chunk_size is not None and chunk_size not in chunk_sizes:
        known = ", ".join(map(str, chunk_sizes))
        raise ValueError(f"chunk_size is {chunk_size}, and fla takes {known}")
    real = wide(q)
    if g is not None and use_gate_in_kernel:
        g = _gate(g, A_log, dt_bias, lower_bound)
    if gk is not None:
        g = gk if g is None else g.unsqueeze(3) + gk
    if g is None:
        g = torch.zeros(v.shape[:3], dtype=real, device=v.device)
    if beta is None:
        beta = torch.ones(v.shape[:3], dtype=real, device=v.device)
    elif beta.dim() == 4:
        raise NotImplementedError("with a beta of each channel of v: it has to be one of each head")
    if use_beta_sigmoid_in_kernel:
        beta = beta.to(real).sigmoid() * (2 if allow_neg_eigval else 1)
    if cu_seqlens is not None:
        refuse_states(initial_state, output_final_state)
        g = apart(g, cu_seqlens)
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
    value = g.to(wide(g))
    return value if bias is None else value + bias.to(value.dtype).reshape(shape)


def delta_product(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    num_householder: int,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> _Pair:
    """`delta_rule` with several keys at each step, n = `num_householder`: as many steps, of which
    the first decays and the last is read.

    Args:
        q: (b, l, H, K).
        k: (b, l·n, H, K).
        v: (b, l·n, H, V).
        g: (b, l, H), or None for no decay.
        beta: (b, l·n, H).
        cu_seqlens: as of `delta_rule`, of the l steps.
    """
    n = num_householder
    every = q.unsqueeze(2).expand(-1, -1, n, -1, -1).flatten(1, 2)
    if cu_seqlens is not None:
        refuse_states(initial_state, output_final_state)
        g = torch.zeros(q.shape[:3], dtype=wide(q), device=q.device) if g is None else g
        g = apart(g, cu_seqlens)
    if g is not None:
        g = F.pad(g.unsqueeze(2), (0, 0, 0, n - 1)).flatten(1, 2)
    state = (initial_state, output_final_state, use_qk_l2norm_in_kernel)
    out, last = delta_rule(every, k, v, g, None, beta, scale, *state)
    return out.unflatten(1, (-1, n))[:, :, -1], last


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{f"{way}_{name}": delta_rule for way in _WAYS for name in ("delta_rule", "gdn")},
    **{f"{way}_gated_delta_rule": delta_rule for way in _WAYS},
    **{f"{way}_kda": partial(delta_rule, chunk_sizes=(32, 64)) for way in _WAYS},
    "chunk_gated_delta_product": delta_product,
    "fused_gdn_gate": head_gate,
    "fused_kda_gate": channel_gate,
}
