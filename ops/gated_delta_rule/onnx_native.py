"""The rule as ONNX Runtime's `LinearAttention` by rule "gated_delta", which opset 27 has too.

q and k are repeated for the heads of a group: the operator, with fewer of them than values, would
have groups of queries alone.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["TYPES", "decompositions"]

TYPES = {"LinearAttention"}


def decompositions() -> dict[str, Callable[..., Any]]:
    """Forms in that operator, by name of ours; one returns None for what it has not."""
    return {"gated_delta_rule": _rule}


def _rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, scale: float
) -> tuple[Tensor, ...] | None:
    # The operator has no float64; over no keys ONNX Runtime divides by 0, which ends the process;
    # and a scale that is 0 in float32, its default, would stand for 1/√K.
    if q.dtype == torch.float64 or q.shape[3] == 0 or abs(scale) <= 2.0**-150:
        return None
    wide = torch.float32
    heads, groups, values = v.shape[2], q.shape[2], v.shape[3]
    query, key = (
        t.to(wide).unsqueeze(3).expand(-1, -1, -1, heads // groups, -1).flatten(2) for t in (q, k)
    )
    out, final_state = torch.onnx.ops.symbolic_multi_out(
        "com.microsoft::LinearAttention",
        (query, key, v.to(wide).flatten(2), initial_state, g.flatten(2), beta),
        {
            "update_rule": "gated_delta",
            "scale": scale,
            "q_num_heads": heads,
            "kv_num_heads": heads,
        },
        dtypes=(wide, wide),
        shapes=((*v.shape[:2], heads * values), initial_state.shape),
        version=1,
    )
    return out.unflatten(2, (heads, values)).to(v.dtype), final_state
