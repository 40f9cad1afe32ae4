"""What the inputs of a selective scan must be, and the shapes, dtypes and strides of its outputs.

`checks.hpp` has the same checks in the same order with the same messages, for hosts that have no
Python; a test holds the two against each other.
"""

import torch
from torch import Tensor

from fuseport.ops.checks import dtype_name, require, require_like, require_shape
from fuseport.ops.layout import empty_as

__all__ = [
    "CHUNK",
    "check",
    "check_backward",
    "chunks",
    "fake_scan",
    "fake_scan_backward",
    "fake_scan_gated",
    "fake_scan_gated_backward",
]

CHUNK = 64
"""Steps between saved states: from each, backward computes the states of a chunk again."""

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def chunks(length: int) -> int:
    """How many states are saved: before each chunk, and after the last; `length` may be symbolic.

    The one after the last keeps the number above 1 for every length. Tracing asks of each size
    whether it is 1, and `⌈length/64⌉ == 1` would be a guard on the length.
    """
    return (length + CHUNK - 1) // CHUNK + 1


def _require_like(op: str, name: str, t: Tensor, dtype: torch.dtype, u: Tensor) -> None:
    require_like(op, name, t, dtype, u, "u")


def _check_coefficient(op: str, name: str, t: Tensor, u: Tensor, A: Tensor) -> None:
    b, d, l = u.shape  # noqa: E741
    states = A.shape[1]
    row, n = ("2l", 2 * l) if A.is_complex() else ("l", l)
    _require_like(op, name, t, A.dtype if A.is_complex() and t.dim() == 2 else u.dtype, u)
    if t.dim() == 2:
        require_shape(op, name, t, "(d, N)", (d, states))
    elif t.dim() == 3:
        require_shape(op, name, t, f"(b, N, {row})", (b, states, n))
    elif t.dim() == 4:
        groups = t.shape[1]
        divides = groups >= 1 and d % groups == 0
        require(divides, op, name, f"of groups that divide {d} channels", groups)
        require_shape(op, name, t, f"(b, G, N, {row})", (b, groups, states, n))
    else:
        forms = f"(d, N), (b, N, {row}) or (b, G, N, {row})"
        require(False, op, name, forms, tuple(t.shape))


def check(
    op: str,
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor | None,
    delta_bias: Tensor,
) -> None:
    """Raises ValueError, naming `op` and the argument, unless the inputs fit each other."""
    require(u.dim() == 3, op, "u", "(b, d, l)", tuple(u.shape))
    require(
        u.dtype in _DTYPES, op, "u", "float16, bfloat16, float32 or float64", dtype_name(u.dtype)
    )
    d = u.shape[1]
    state_dtype = torch.float64 if u.dtype == torch.float64 else torch.float32

    _require_like(op, "delta", delta, u.dtype, u)
    require_shape(op, "delta", delta, "u's shape", tuple(u.shape))
    _require_like(op, "A", A, state_dtype.to_complex() if A.is_complex() else state_dtype, u)
    require(A.dim() == 2, op, "A", "(d, N)", tuple(A.shape))
    require_shape(op, "A", A, "(d, N)", (d, A.shape[1]))
    _check_coefficient(op, "B", B, u, A)
    _check_coefficient(op, "C", C, u, A)
    _require_like(op, "D", D, state_dtype, u)
    require_shape(op, "D", D, "(d,)", (d,))
    if z is not None:
        _require_like(op, "z", z, u.dtype, u)
        require_shape(op, "z", z, "u's shape", tuple(u.shape))
    _require_like(op, "delta_bias", delta_bias, state_dtype, u)
    require_shape(op, "delta_bias", delta_bias, "(d,)", (d,))


def check_backward(
    op: str, dout: Tensor, dlast_state: Tensor, u: Tensor, A: Tensor, chunk_states: Tensor
) -> None:
    """Raises ValueError unless cotangents and saved states fit inputs that passed `check`."""
    b, d, l = u.shape  # noqa: E741
    states = A.shape[1]
    _require_like(op, "dout", dout, u.dtype, u)
    require_shape(op, "dout", dout, "u's shape", (b, d, l))
    _require_like(op, "dlast_state", dlast_state, A.dtype, u)
    require_shape(op, "dlast_state", dlast_state, "(b, d, N)", (b, d, states))
    _require_like(op, "chunk_states", chunk_states, A.dtype, u)
    saved = (b, chunks(l), states, d)
    require_shape(op, "chunk_states", chunk_states, "(b, ⌈l/64⌉ + 1, N, d)", saved)


def _outputs(u: Tensor, A: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    b, d, l = u.shape  # noqa: E741
    states = A.shape[1]
    return empty_as(u), A.new_empty((b, d, states)), A.new_empty((b, chunks(l), states, d))


def _flat(t: Tensor) -> Tensor:
    return torch.empty(t.shape, dtype=t.dtype, device=t.device)


def fake_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    delta_bias: Tensor,
    delta_softplus: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Empty outputs of `fuseport::selective_scan`."""
    check("selective_scan", u, delta, A, B, C, D, None, delta_bias)
    return _outputs(u, A)


def fake_scan_gated(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor,
    delta_bias: Tensor,
    delta_softplus: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Empty outputs of `fuseport::selective_scan_gated`."""
    check("selective_scan_gated", u, delta, A, B, C, D, z, delta_bias)
    return _outputs(u, A)


def fake_scan_backward(
    dout: Tensor,
    dlast_state: Tensor,
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    delta_bias: Tensor,
    chunk_states: Tensor,
    delta_softplus: bool,
) -> tuple[Tensor, ...]:
    """Empty outputs of `fuseport::selective_scan_backward`."""
    op = "selective_scan_backward"
    check(op, u, delta, A, B, C, D, None, delta_bias)
    check_backward(op, dout, dlast_state, u, A, chunk_states)
    return empty_as(u), empty_as(delta), *map(_flat, (A, B, C, D, delta_bias))


def fake_scan_gated_backward(
    dout: Tensor,
    dlast_state: Tensor,
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor,
    delta_bias: Tensor,
    chunk_states: Tensor,
    delta_softplus: bool,
) -> tuple[Tensor, ...]:
    """Empty outputs of `fuseport::selective_scan_gated_backward`."""
    op = "selective_scan_gated_backward"
    check(op, u, delta, A, B, C, D, z, delta_bias)
    check_backward(op, dout, dlast_state, u, A, chunk_states)
    dA, dB, dC, dD, ddelta_bias = map(_flat, (A, B, C, D, delta_bias))
    return empty_as(u), empty_as(delta), dA, dB, dC, dD, empty_as(z), ddelta_bias
