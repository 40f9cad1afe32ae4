"""What the inputs of a state update must be, and its outputs' shapes, dtypes and strides.

`torch.cpp` has the same checks in the same order with the same messages; a test holds the two
against each other.
"""

import torch
from torch import Tensor

from fuseport.ops.checks import dtype_name, require, require_like, require_shape
from fuseport.ops.spec import FLOATING

__all__ = ["check", "fake_update", "fake_update_gated"]


def check(
    op: str,
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor | None,
    dt_bias: Tensor,
) -> None:
    """Raises ValueError, naming `op` and the argument, unless the inputs fit each other."""
    require(x.dim() == 3, op, "x", "(b, h, d)", tuple(x.shape))
    require(x.dtype in FLOATING, op, "x", "float16, bfloat16, float32 or float64", _name(x))
    b, h, d = x.shape
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32

    if state.dtype not in (x.dtype, wide):
        require(False, op, "state", f"{_name(x)} or {dtype_name(wide)}", _name(state))
    require_like(op, "state", state, state.dtype, x, "x")
    require(state.dim() == 4, op, "state", "(b, h, d, N)", tuple(state.shape))
    states = state.shape[3]
    require_shape(op, "state", state, "(b, h, d, N)", (b, h, d, states))
    require_like(op, "dt", dt, x.dtype, x, "x")
    require_shape(op, "dt", dt, "x's shape", (b, h, d))
    require_like(op, "A", A, wide, x, "x")
    require_shape(op, "A", A, "(h, d, N)", (h, d, states))
    for name, t in (("B", B), ("C", C)):
        require_like(op, name, t, x.dtype, x, "x")
        require(t.dim() == 3, op, name, "(b, g, N)", tuple(t.shape))
        groups = t.shape[1]
        divides = groups >= 1 and h % groups == 0
        require(divides, op, name, f"of groups that divide {h} heads", groups)
        require_shape(op, name, t, "(b, g, N)", (b, groups, states))
    if C.shape[1] != B.shape[1]:
        require(False, op, "C", f"of as many groups as B = {B.shape[1]}", C.shape[1])
    require_like(op, "D", D, wide, x, "x")
    require_shape(op, "D", D, "(h, d)", (h, d))
    if z is not None:
        require_like(op, "z", z, x.dtype, x, "x")
        require_shape(op, "z", z, "x's shape", (b, h, d))
    require_like(op, "dt_bias", dt_bias, wide, x, "x")
    require_shape(op, "dt_bias", dt_bias, "(h, d)", (h, d))


def _name(t: Tensor) -> str:
    return dtype_name(t.dtype)


def _outputs(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Contiguous, whatever the inputs are."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return out, torch.empty(state.shape, dtype=state.dtype, device=state.device)


def fake_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    dt_softplus: bool,
) -> tuple[Tensor, Tensor]:
    """Empty outputs of `fuseport::selective_state_update`."""
    check("selective_state_update", state, x, dt, A, B, C, D, None, dt_bias)
    return _outputs(state, x)


def fake_update_gated(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor,
    dt_bias: Tensor,
    dt_softplus: bool,
) -> tuple[Tensor, Tensor]:
    """Empty outputs of `fuseport::selective_state_update_gated`."""
    check("selective_state_update_gated", state, x, dt, A, B, C, D, z, dt_bias)
    return _outputs(state, x)
