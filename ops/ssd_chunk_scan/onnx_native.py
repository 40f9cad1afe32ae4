"""The scan as ONNX Runtime's `LinearAttention` by rule "gated", which opset 27 has too.

query = C, key = B, value = δ·x, decay = δ·A, with the groups of B and C repeated for their heads.
The decay of a step that begins another packed sequence is -∞.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fuseport.ops.ssd_chunk_scan.reference import SOFTPLUS_THRESHOLD

__all__ = ["TYPES", "decompositions"]

TYPES = {"LinearAttention"}


def decompositions() -> dict[str, Callable[..., Any]]:
    """Forms in that operator, by name of ours; one returns None for what it has not."""
    return {
        "ssd_chunk_scan": _scan,
        "ssd_chunk_scan_gated": _scan_gated,
        "ssd_chunk_scan_discrete": _discrete,
    }


def _scan_gated(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor,
    dt_bias: Tensor,
    initial_states: Tensor,
    seq_idx: Tensor,
    dt_limit: Tensor,
    dt_softplus: bool,
) -> tuple[Tensor, ...] | None:
    inputs = (dt_bias, initial_states, seq_idx, dt_limit, dt_softplus)
    return _forward(x, dt, A, B, C, D, z, *inputs)


def _scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, *rest: Any
) -> tuple[Tensor, ...] | None:
    return _forward(x, dt, A, B, C, D, None, *rest)


def _forward(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor | None,
    dt_bias: Tensor,
    initial_states: Tensor,
    seq_idx: Tensor,
    dt_limit: Tensor,
    dt_softplus: bool,
) -> tuple[Tensor, ...] | None:
    if x.dtype == torch.float64:  # the operator has no such type
        return None
    step = dt.to(torch.float32) + dt_bias
    step = _softplus(step) if dt_softplus else step
    step = torch.minimum(torch.maximum(step, dt_limit[0]), dt_limit[1])
    u = x.to(torch.float32)
    y, last = _node(u * step.unsqueeze(-1), step * A, B, C, initial_states, seq_idx)
    out = y + D * u
    if z is not None:
        gate = z.to(torch.float32)
        out = out * (gate / (1 + torch.exp(-gate)))
    return out.to(x.dtype), last


def _discrete(
    x: Tensor,
    log_decay: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    initial_states: Tensor,
    seq_idx: Tensor,
) -> tuple[Tensor, ...] | None:
    if x.dtype == torch.float64:
        return None
    u = x.to(torch.float32)
    y, last = _node(u, log_decay, B, C, initial_states, seq_idx)
    return (y + D * u).to(x.dtype), last


def _node(
    values: Tensor, decay: Tensor, B: Tensor, C: Tensor, initial_states: Tensor, seq_idx: Tensor
) -> tuple[Tensor, Tensor]:
    """y, (b, l, H, P), and the last states, (b, H, P, N), in float32."""
    wide, heads, groups = torch.float32, values.shape[2], B.shape[2]
    key, query = (
        t.to(wide).unsqueeze(3).expand(-1, -1, -1, heads // groups, -1).flatten(2) for t in (B, C)
    )
    states, flat = initial_states.mT, values.flatten(2)
    before = torch.cat([seq_idx[:, :1], seq_idx[:, :-1]], 1)
    begins = torch.where(seq_idx == before, 0.0, float("-inf")).to(wide)
    y, last = torch.onnx.ops.symbolic_multi_out(
        "com.microsoft::LinearAttention",
        (query, key, flat, states, decay + begins.unsqueeze(-1)),
        # A scale of 0, the default, would stand for 1/√N.
        {"update_rule": "gated", "scale": 1.0, "q_num_heads": heads, "kv_num_heads": heads},
        dtypes=(wide, wide),
        shapes=(flat.shape, states.shape),
        version=1,
    )
    return y.unflatten(2, (heads, values.shape[3])), last.mT


def _softplus(x: Tensor) -> Tensor:
    # log(1 + e), accurate relatively (Kahan), since ONNX has no log1p.
    e = torch.exp(-x.abs())
    one_more = 1 + e
    log = torch.where(one_more == 1, e, torch.log(one_more) * (e / (one_more - 1)))
    return torch.where(x > SOFTPLUS_THRESHOLD, x, x.clamp(min=0) + log)
