"""What the inputs of the rule must be, and its outputs' shapes, dtypes and strides.

`torch.hpp` has the same checks in the same order with the same messages; a test holds the two
against each other. All outputs are contiguous, whatever the inputs are.
"""

import torch
from torch import Tensor

from fuseport.ops.checks import require, require_like, require_shape
from fuseport.ops.delta_rules import check_backward, check_floating, wide_of

__all__ = ["check", "check_ranks", "fake_rule", "fake_rule_backward"]


def check_ranks(op: str, q: Tensor, v: Tensor) -> None:
    """Raises ValueError unless q and v have the dimensions that all other shapes are made of."""
    require(q.dim() == 4, op, "q", "(n, l, H, K)", tuple(q.shape))
    require(v.dim() == 4, op, "v", "(n, l, H, V)", tuple(v.shape))


def check(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    log_decay: Tensor,
    initial_state: Tensor,
) -> None:
    """Raises ValueError, naming `op` and the argument, unless the inputs fit each other."""
    check_ranks(op, q, v)
    check_floating(op, q)
    n, l, heads, keys = q.shape  # noqa: E741
    values = v.shape[3]
    wide = wide_of(q)

    def fits(name: str, t: Tensor, dtype: torch.dtype, meaning: str, *shape: int) -> None:
        require_like(op, name, t, dtype, q, "q")
        require_shape(op, name, t, meaning, shape)

    fits("k", k, q.dtype, "q's shape", n, l, heads, keys)
    fits("v", v, q.dtype, "(n, l, H, V)", n, l, heads, values)
    fits("a", a, q.dtype, "q's shape", n, l, heads, keys)
    fits("b", b, q.dtype, "q's shape", n, l, heads, keys)
    fits("log_decay", log_decay, wide, "q's shape", n, l, heads, keys)
    fits("initial_state", initial_state, wide, "(n, H, K, V)", n, heads, keys, values)


def _flat(t: Tensor) -> Tensor:
    return torch.empty(t.shape, dtype=t.dtype, device=t.device)


def fake_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    log_decay: Tensor,
    initial_state: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Empty outputs of `fuseport::dplr_delta_rule`."""
    check("dplr_delta_rule", q, k, v, a, b, log_decay, initial_state)
    return _flat(v), _flat(initial_state)


def fake_rule_backward(
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
    """Empty outputs of `fuseport::dplr_delta_rule_backward`."""
    op = "dplr_delta_rule_backward"
    check(op, q, k, v, a, b, log_decay, initial_state)
    check_backward(op, dout, dfinal_state, q, v)
    return tuple(map(_flat, (q, k, v, a, b, log_decay, initial_state)))
