"""What the inputs of the gated delta rule must be, and its outputs' shapes, dtypes and strides.

`torch.hpp` has the same checks in the same order with the same messages; a test holds the two
against each other. All outputs are contiguous, whatever the inputs are.
"""

import torch
from torch import Tensor

from fuseport.ops.checks import require, require_like, require_shape
from fuseport.ops.delta_rules import check_backward, check_floating, wide_of

__all__ = [
    "check",
    "check_decay",
    "check_ranks",
    "fake_rule",
    "fake_rule_backward",
]


def check_ranks(op: str, q: Tensor, v: Tensor) -> None:
    """Raises ValueError unless q and v have the dimensions that all other shapes are made of."""
    require(q.dim() == 4, op, "q", "(b, l, G, K)", tuple(q.shape))
    require(v.dim() == 4, op, "v", "(b, l, H, V)", tuple(v.shape))


def check_decay(op: str, g: Tensor, v: Tensor) -> None:
    """Raises ValueError unless g, as it is given, is of v's heads, or of their key channels."""
    require(g.dim() in (3, 4), op, "g", "(b, l, H) or (b, l, H, K)", tuple(g.shape))
    if g.dim() == 3:
        require_shape(op, "g", g, "(b, l, H)", tuple(v.shape[:3]))


def check(
    op: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor
) -> None:
    """Raises ValueError, naming `op` and the argument, unless the inputs fit each other."""
    check_ranks(op, q, v)
    check_floating(op, q)
    b, l, groups, keys = q.shape  # noqa: E741
    heads, values = v.shape[2:]
    wide = wide_of(q)

    def fits(name: str, t: Tensor, dtype: torch.dtype, meaning: str, *shape: int) -> None:
        require_like(op, name, t, dtype, q, "q")
        require_shape(op, name, t, meaning, shape)

    fits("k", k, q.dtype, "q's shape", b, l, groups, keys)
    divides = groups >= 1 and heads % groups == 0
    require(divides, op, "q", f"of heads that divide {heads} heads of v", groups)
    fits("v", v, q.dtype, "(b, l, H, V)", b, l, heads, values)
    require(g.dim() == 4, op, "g", "(b, l, H, 1 or K)", tuple(g.shape))
    channels = 1 if g.shape[3] == 1 else keys
    fits("g", g, wide, "(b, l, H, 1 or K)", b, l, heads, channels)
    fits("beta", beta, wide, "(b, l, H)", b, l, heads)
    fits("initial_state", initial_state, wide, "(b, H, K, V)", b, heads, keys, values)


def _flat(t: Tensor) -> Tensor:
    return torch.empty(t.shape, dtype=t.dtype, device=t.device)


def fake_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Empty outputs of `fuseport::gated_delta_rule`."""
    check("gated_delta_rule", q, k, v, g, beta, initial_state)
    return _flat(v), _flat(initial_state)


def fake_rule_backward(
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
    """Empty outputs of `fuseport::gated_delta_rule_backward`."""
    op = "gated_delta_rule_backward"
    check(op, q, k, v, g, beta, initial_state)
    check_backward(op, dout, dfinal_state, q, v)
    return tuple(map(_flat, (q, k, v, g, beta, initial_state)))
