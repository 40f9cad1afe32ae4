"""What the inputs of a chunked scan must be, and its outputs' shapes, dtypes and strides.

`checks.hpp` has the same checks in the same order with the same messages; a test holds the two
against each other. All outputs are contiguous, whatever the inputs are.
"""

import torch
from torch import Tensor

from fuseport.ops.checks import dtype_name, require, require_like, require_shape
from fuseport.ops.spec import FLOATING

__all__ = [
    "CHUNK",
    "LEAST_LOG_DECAY",
    "check",
    "check_backward",
    "check_discrete",
    "check_ranks",
    "fake_scan",
    "fake_scan_backward",
    "fake_scan_discrete",
    "fake_scan_discrete_backward",
    "fake_scan_gated",
    "fake_scan_gated_backward",
]

CHUNK = 64
"""Steps whose outputs are products of matrices; between chunks the state is carried."""

LEAST_LOG_DECAY = -1e3
"""Of given decays: what is less, -∞ too, decays to nothing as well, and a sum of it has digits
left."""


def check_ranks(op: str, x: Tensor, B: Tensor) -> None:
    """Raises ValueError unless x and B have the dimensions that all other shapes are made of."""
    require(x.dim() == 4, op, "x", "(b, l, H, P)", tuple(x.shape))
    require(B.dim() == 4, op, "B", "(b, l, G, N)", tuple(B.shape))


def check(
    op: str,
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
) -> None:
    """Raises ValueError, naming `op` and the argument, unless the inputs fit each other."""
    fits = _Fits(op, x, B)
    b, l, h, p = x.shape  # noqa: E741
    fits("dt", dt, x.dtype, "(b, l, H)", b, l, h)
    fits("A", A, fits.wide, "(H,)", h)
    fits.coefficients(B, C, D)
    if z is not None:
        fits("z", z, x.dtype, "x's shape", b, l, h, p)
    fits("dt_bias", dt_bias, fits.wide, "(H,)", h)
    fits.sequences(initial_states, seq_idx)
    fits("dt_limit", dt_limit, fits.wide, "(2,)", 2)


def check_discrete(
    op: str,
    x: Tensor,
    log_decay: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    initial_states: Tensor,
    seq_idx: Tensor,
) -> None:
    """The same of inputs whose decays are given, and which are not multiplied by steps."""
    fits = _Fits(op, x, B)
    fits("log_decay", log_decay, fits.wide, "(b, l, H)", *x.shape[:3])
    fits.coefficients(B, C, D)
    fits.sequences(initial_states, seq_idx)


class _Fits:
    """Whether what is beside x fits it."""

    def __init__(self, op: str, x: Tensor, B: Tensor) -> None:
        check_ranks(op, x, B)
        meaning = "float16, bfloat16, float32 or float64"
        require(x.dtype in FLOATING, op, "x", meaning, dtype_name(x.dtype))
        self.op, self.x, self.states = op, x, B.shape[3]
        self.wide = torch.float64 if x.dtype == torch.float64 else torch.float32

    def __call__(self, name: str, t: Tensor, dtype: torch.dtype, meaning: str, *shape: int) -> None:
        require_like(self.op, name, t, dtype, self.x, "x")
        require_shape(self.op, name, t, meaning, shape)

    def coefficients(self, B: Tensor, C: Tensor, D: Tensor) -> None:
        b, l, h, p = self.x.shape  # noqa: E741
        groups, states = B.shape[2:]
        divides = groups >= 1 and h % groups == 0
        require(divides, self.op, "B", f"of groups that divide {h} heads", groups)
        self("B", B, self.x.dtype, "(b, l, G, N)", b, l, groups, states)
        self("C", C, self.x.dtype, "B's shape", b, l, groups, states)
        self("D", D, self.wide, "(H, P)", h, p)

    def sequences(self, initial_states: Tensor, seq_idx: Tensor) -> None:
        b, l, h, p = self.x.shape  # noqa: E741
        self("initial_states", initial_states, self.wide, "(b, H, P, N)", b, h, p, self.states)
        self("seq_idx", seq_idx, torch.int32, "(b, l)", b, l)


def check_backward(op: str, dout: Tensor, dfinal_states: Tensor, x: Tensor, B: Tensor) -> None:
    """Raises ValueError unless cotangents fit inputs that passed `check`."""
    b, l, h, p = x.shape  # noqa: E741
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    require_like(op, "dout", dout, x.dtype, x, "x")
    require_shape(op, "dout", dout, "x's shape", (b, l, h, p))
    require_like(op, "dfinal_states", dfinal_states, wide, x, "x")
    shape = (b, h, p, B.shape[3])
    require_shape(op, "dfinal_states", dfinal_states, "(b, H, P, N)", shape)


def _flat(t: Tensor) -> Tensor:
    return torch.empty(t.shape, dtype=t.dtype, device=t.device)


def fake_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    initial_states: Tensor,
    seq_idx: Tensor,
    dt_limit: Tensor,
    dt_softplus: bool,
) -> tuple[Tensor, Tensor]:
    """Empty outputs of `fuseport::ssd_chunk_scan`."""
    check("ssd_chunk_scan", x, dt, A, B, C, D, None, dt_bias, initial_states, seq_idx, dt_limit)
    return _flat(x), _flat(initial_states)


def fake_scan_gated(
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
) -> tuple[Tensor, Tensor]:
    """Empty outputs of `fuseport::ssd_chunk_scan_gated`."""
    op = "ssd_chunk_scan_gated"
    check(op, x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, dt_limit)
    return _flat(x), _flat(initial_states)


def fake_scan_backward(
    dout: Tensor,
    dfinal_states: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    initial_states: Tensor,
    seq_idx: Tensor,
    dt_limit: Tensor,
    dt_softplus: bool,
) -> tuple[Tensor, ...]:
    """Empty outputs of `fuseport::ssd_chunk_scan_backward`."""
    op = "ssd_chunk_scan_backward"
    check(op, x, dt, A, B, C, D, None, dt_bias, initial_states, seq_idx, dt_limit)
    check_backward(op, dout, dfinal_states, x, B)
    return tuple(map(_flat, (x, dt, A, B, C, D, dt_bias, initial_states)))


def fake_scan_gated_backward(
    dout: Tensor,
    dfinal_states: Tensor,
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
) -> tuple[Tensor, ...]:
    """Empty outputs of `fuseport::ssd_chunk_scan_gated_backward`."""
    op = "ssd_chunk_scan_gated_backward"
    check(op, x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, dt_limit)
    check_backward(op, dout, dfinal_states, x, B)
    return tuple(map(_flat, (x, dt, A, B, C, D, z, dt_bias, initial_states)))


def fake_scan_discrete(
    x: Tensor,
    log_decay: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    initial_states: Tensor,
    seq_idx: Tensor,
) -> tuple[Tensor, Tensor]:
    """Empty outputs of `fuseport::ssd_chunk_scan_discrete`."""
    check_discrete("ssd_chunk_scan_discrete", x, log_decay, B, C, D, initial_states, seq_idx)
    return _flat(x), _flat(initial_states)


def fake_scan_discrete_backward(
    dout: Tensor,
    dfinal_states: Tensor,
    x: Tensor,
    log_decay: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    initial_states: Tensor,
    seq_idx: Tensor,
) -> tuple[Tensor, ...]:
    """Empty outputs of `fuseport::ssd_chunk_scan_discrete_backward`."""
    op = "ssd_chunk_scan_discrete_backward"
    check_discrete(op, x, log_decay, B, C, D, initial_states, seq_idx)
    check_backward(op, dout, dfinal_states, x, B)
    return tuple(map(_flat, (x, log_decay, B, C, D, initial_states)))
