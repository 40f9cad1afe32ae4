"""The chunked scan in plain torch, forward and backward: what the kernels are held against.

Any device, and any dtype that the op takes; in float64 it is the truth of a verification. Forward
is differentiable by autograd. Backward is stated explicitly, because autograd cannot be called
inside a registered operator.

Within a chunk, with c_t = Σ_{r ≤ t} δ_r A, with h the state before the chunk and g the cotangent of
the one after it, h_next; t and s are steps, and T is the last:

    L_ts = exp(c_t - c_s) for s ≤ t, else 0      M_ts = (C_t·B_s) L_ts δ_s
    y_t = exp(c_t) h C_t + Σ_s M_ts x_s h_next = exp(c_T) h + Σ_s w_s x_s B_sᵀ
    w_s = exp(c_T - c_s) δ_s

Sequences that are packed share no state: L_ts is 0 where s and t are of two, exp(c_t) where another
has begun since the chunk was entered, and exp(c_T - c_s) where another begins after s. With these
zeros the rest holds:

    dM_ts = dy_t·x_s, Q_ts = dM_ts L_ts δ_s, K_ts = dM_ts (C_t·B_s) L_ts, dw_s = x_sᵀ g B_s
    dx_s = Σ_t M_ts dy_t + w_s g B_s       dh = exp(c_T) g + Σ_t exp(c_t) dy_t C_tᵀ
    dC_t = Σ_s Q_ts B_s + exp(c_t) hᵀ dy_t   dB_s = Σ_t Q_ts C_t + w_s gᵀ x_s
    dc_t = Σ_s K_ts δ_s - δ_t Σ_r K_rt + exp(c_t) dy_tᵀ h C_t - w_t dw_t
    dc_T has beside it Σ_s w_s dw_s + exp(c_T) Σ g h
    dδ_s = Σ_t K_ts + exp(c_T - c_s) dw_s + A Σ_{t ≥ s} dc_t       dA = Σ_s δ_s Σ_{t ≥ s} dc_t

The discrete scan is given δ_s A, whose gradient is Σ_{t ≥ s} dc_t, and has 1 for δ_s elsewhere.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.ops.ssd_chunk_scan.shapes import (
    CHUNK,
    LEAST_LOG_DECAY,
    check,
    check_backward,
    check_discrete,
)

__all__ = [
    "ssd_chunk_scan",
    "ssd_chunk_scan_backward",
    "ssd_chunk_scan_discrete",
    "ssd_chunk_scan_discrete_backward",
    "ssd_chunk_scan_gated",
    "ssd_chunk_scan_gated_backward",
]

SOFTPLUS_THRESHOLD = 20.0


def ssd_chunk_scan(
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
    """out, (b, l, H, P), and final_states, (b, H, P, N)."""
    check("ssd_chunk_scan", x, dt, A, B, C, D, None, dt_bias, initial_states, seq_idx, dt_limit)
    rest = (dt_bias, initial_states, seq_idx, dt_limit, dt_softplus)
    return _forward(x, dt, A, B, C, D, None, *rest)


def ssd_chunk_scan_gated(
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
    """The same, with out multiplied by SiLU(z)."""
    op = "ssd_chunk_scan_gated"
    check(op, x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, dt_limit)
    return _forward(x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, dt_limit, dt_softplus)


def ssd_chunk_scan_backward(
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
    """(dx, ddt, dA, dB, dC, dD, ddt_bias, dinitial_states), each like its input."""
    op = "ssd_chunk_scan_backward"
    check(op, x, dt, A, B, C, D, None, dt_bias, initial_states, seq_idx, dt_limit)
    check_backward(op, dout, dfinal_states, x, B)
    rest = (dt_bias, initial_states, seq_idx, dt_limit, dt_softplus)
    return _backward(dout, dfinal_states, x, dt, A, B, C, D, None, *rest)


def ssd_chunk_scan_gated_backward(
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
    """(dx, ddt, dA, dB, dC, dD, dz, ddt_bias, dinitial_states), each like its input."""
    op = "ssd_chunk_scan_gated_backward"
    check(op, x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx, dt_limit)
    check_backward(op, dout, dfinal_states, x, B)
    rest = (dt_bias, initial_states, seq_idx, dt_limit, dt_softplus)
    return _backward(dout, dfinal_states, x, dt, A, B, C, D, z, *rest)


def ssd_chunk_scan_discrete(
    x: Tensor,
    log_decay: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    initial_states: Tensor,
    seq_idx: Tensor,
) -> tuple[Tensor, Tensor]:
    """The same of given decays, exp(log_decay), and of x as it is, without steps."""
    check_discrete("ssd_chunk_scan_discrete", x, log_decay, B, C, D, initial_states, seq_idx)
    wide, l = D.dtype, x.shape[1]  # noqa: E741
    k = _discrete(x.to(wide), log_decay, B.to(wide), C.to(wide), seq_idx)
    before, final_states = k.states(initial_states)
    out = k.outputs(before)[:, :l] + D * x.to(wide)
    return _contiguous(out.to(x.dtype)), _contiguous(final_states)


def ssd_chunk_scan_discrete_backward(
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
    """(dx, dlog_decay, dB, dC, dD, dinitial_states), each like its input."""
    op = "ssd_chunk_scan_discrete_backward"
    check_discrete(op, x, log_decay, B, C, D, initial_states, seq_idx)
    check_backward(op, dout, dfinal_states, x, B)
    wide = D.dtype
    u, dy = x.to(wide), dout.to(wide)
    k = _discrete(u, log_decay, B.to(wide), C.to(wide), seq_idx)
    before, _ = k.states(initial_states)
    dx, _, dexponent, dB, dC, dinitial = _gradients(k, before, dy, dfinal_states, B.shape[2])
    return (
        _contiguous((dx + D * dy).to(x.dtype)),
        _contiguous(dexponent),
        _contiguous(dB.to(B.dtype)),
        _contiguous(dC.to(C.dtype)),
        (dy * u).sum((0, 1)),
        _contiguous(dinitial),
    )


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
) -> tuple[Tensor, Tensor]:
    wide, l = A.dtype, x.shape[1]  # noqa: E741
    step = _step(dt.to(wide) + dt_bias, dt_limit, dt_softplus)
    chunked = _Chunks(x.to(wide), step, step * A, B.to(wide), C.to(wide), seq_idx)
    before, final_states = chunked.states(initial_states)
    y = chunked.outputs(before)[:, :l] + D * x.to(wide)
    out = y if z is None else y * F.silu(z.to(wide))
    return _contiguous(out.to(x.dtype)), _contiguous(final_states)


def _backward(
    dout: Tensor,
    dfinal_states: Tensor,
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
) -> tuple[Tensor, ...]:
    wide, l = A.dtype, x.shape[1]  # noqa: E741
    u, raw = x.to(wide), dt.to(wide) + dt_bias
    step = _step(raw, dt_limit, dt_softplus)
    k = _Chunks(u, step, step * A, B.to(wide), C.to(wide), seq_idx)
    before, _ = k.states(initial_states)
    dout_ = dy = dout.to(wide)
    dz: tuple[Tensor, ...] = ()
    if z is not None:
        gate = z.to(wide)
        s = gate.sigmoid()
        y = k.outputs(before)[:, :l] + D * u
        dz = (_contiguous((dout_ * y * s * (1 + gate * (1 - s))).to(z.dtype)),)
        dy = dout_ * gate * s
    dx, dstep, dexponent, dB, dC, dinitial = _gradients(k, before, dy, dfinal_states, B.shape[2])

    low, high = dt_limit
    smooth = F.softplus(raw, threshold=SOFTPLUS_THRESHOLD) if dt_softplus else raw
    draw = torch.where((smooth >= low) & (smooth <= high), dstep + dexponent * A, 0)
    if dt_softplus:
        draw = torch.where(raw > SOFTPLUS_THRESHOLD, draw, draw * raw.sigmoid())
    return (
        _contiguous((dx + D * dy).to(x.dtype)),
        _contiguous(draw.to(dt.dtype)),
        (dexponent * step).sum((0, 1)),
        _contiguous(dB.to(B.dtype)),
        _contiguous(dC.to(C.dtype)),
        (dy * u).sum((0, 1)),
        *dz,
        draw.sum((0, 1)),
        _contiguous(dinitial),
    )


def _gradients(
    k: "_Chunks", before: Tensor, dy: Tensor, dfinal_states: Tensor, groups: int
) -> tuple[Tensor, ...]:
    """Of x, of δ_s beside x_s, of δ_s A, of B, C and the initial states: all real.

    The scan is without D, its gate and what its steps are made of.
    """
    l = dy.shape[1]  # noqa: E741
    # Heads come before steps: (b, c, H, t, …).
    dy_ = _chunked(dy).transpose(2, 3)
    B_, C_, x_ = (t.transpose(2, 3) for t in (k.B, k.C, k.x))
    # What each chunk adds to the cotangent of the state before it, then that after each chunk.
    inflow = (dy_ * k.outer[..., None]).mT @ C_
    g, after = dfinal_states, []
    for decay, added in zip(k.decay.flip(1).unbind(1), inflow.flip(1).unbind(1), strict=True):
        after.append(g)
        g = decay[..., None, None] * g + added
    dafter = torch.stack(after[::-1], 1) if after else inflow

    dM = dy_ @ x_.mT
    Q = dM * k.L * k.step[..., None, :]
    K = dM * k.CB * k.L
    gB = B_ @ dafter.mT
    dw = (gB * x_).sum(-1)
    w = k.remaining * k.step
    dx = (k.M.mT @ dy_ + w[..., None] * gB).transpose(2, 3)
    read = (dy_ @ before) * k.outer[..., None]
    dC = (Q @ B_ + read).transpose(2, 3)
    dB = (Q.mT @ C_ + w[..., None] * (x_ @ dafter)).transpose(2, 3)
    dc = (K * k.step[..., None, :]).sum(-1) - k.step * K.sum(-2)
    dc = dc + (read * C_).sum(-1) - w * dw
    last = (w * dw).sum(-1) + k.decay * (dafter * before).sum((-1, -2))
    # Σ_{t ≥ s} dc_t, as what is left of the sum of all.
    later = dc.flip(-1).cumsum(-1).flip(-1) + last[..., None]
    dstep = K.sum(-2) + k.remaining * dw
    return (
        _joined(dx, l),
        _joined(dstep.transpose(2, 3), l),
        _joined(later.transpose(2, 3), l),
        _joined(dB, l).unflatten(2, (groups, -1)).sum(3),
        _joined(dC, l).unflatten(2, (groups, -1)).sum(3),
        g,
    )


def _discrete(x: Tensor, log_decay: Tensor, B: Tensor, C: Tensor, seq_idx: Tensor) -> "_Chunks":
    exponent = log_decay.clamp(min=LEAST_LOG_DECAY)
    return _Chunks(x, torch.ones_like(log_decay), exponent, B, C, seq_idx)


class _Chunks:
    """The matrices of all chunks: c chunks of t steps, the last one filled up with steps of 0.

    A sequence that is shorter than a chunk is one by itself, without these.
    """

    def __init__(
        self, x: Tensor, step: Tensor, exponent: Tensor, B: Tensor, C: Tensor, seq_idx: Tensor
    ) -> None:
        heads, groups = x.shape[2], B.shape[2]
        self.x = _chunked(x)  # (b, c, t, H, P)
        self.B, self.C = (
            _chunked(t).repeat_interleave(heads // groups, dim=3) for t in (B, C)
        )  # (b, c, t, H, N)
        self.step = _chunked(step).transpose(2, 3)  # (b, c, H, t)
        total = _chunked(exponent).transpose(2, 3).cumsum(-1)
        difference = total[..., :, None] - total[..., None, :]
        past = difference.new_ones(difference.shape[3:], dtype=torch.bool).tril()
        sequence, entering = _sequences(seq_idx)  # (b, c, 1, t), (b, c, 1, 1)
        within = past & (sequence[..., :, None] == sequence[..., None, :])
        # Masked before exp, whose overflow would be NaN in a gradient.
        self.L = _exp(difference, within)  # (b, c, H, t, s)
        self.outer = _exp(total, sequence == entering)
        self.remaining = _exp(total[..., -1:] - total, sequence == sequence[..., -1:])
        self.decay = self.outer[..., -1]  # (b, c, H)
        products = _chunked(C).transpose(2, 3) @ _chunked(B).permute(0, 1, 3, 4, 2)
        self.CB = products.repeat_interleave(heads // groups, dim=2)
        self.M = self.CB * self.L * self.step[..., None, :]

    def states(self, initial: Tensor) -> tuple[Tensor, Tensor]:
        """The states before each chunk, (b, c, H, P, N), and after the last."""
        weighted = self.x.transpose(2, 3) * (self.remaining * self.step)[..., None]
        added = weighted.mT @ self.B.transpose(2, 3)
        state, before = initial, []
        for decay, new in zip(self.decay.unbind(1), added.unbind(1), strict=True):
            before.append(state)
            state = decay[..., None, None] * state + new
        return torch.stack(before, 1) if before else added, state

    def outputs(self, before: Tensor) -> Tensor:
        """y without D, of all steps of the chunks, (b, c·t, H, P)."""
        read = (self.C.transpose(2, 3) @ before.mT) * self.outer[..., None]
        y = read + self.M @ self.x.transpose(2, 3)
        return y.transpose(2, 3).flatten(1, 2)


def _step(raw: Tensor, limit: Tensor, softplus: bool) -> Tensor:
    step = F.softplus(raw, threshold=SOFTPLUS_THRESHOLD) if softplus else raw
    low, high = limit.detach()  # bounds get no gradient
    return step.clamp(low, high)


def _sequences(seq_idx: Tensor) -> tuple[Tensor, Tensor]:
    """The number of each step's sequence, (b, c, 1, t), and of that before the chunk, (b, c, 1, 1).

    Sequences are counted, since an index may come back; filled up steps are of the last one.
    """
    before = seq_idx[:, :1], seq_idx[:, :-1]
    number = (seq_idx != torch.cat(before, 1)).cumsum(1)
    steps = _steps(number.shape[1])
    missing = -number.shape[1] % steps
    number = torch.cat([number, number[:, -1:].expand(-1, missing)], 1)
    number = number.unflatten(1, (number.shape[1] // steps, steps))
    entering = torch.cat([number[:, :1, 0], number[:, :-1, -1]], 1)
    return number[:, :, None], entering[:, :, None, None]


def _exp(t: Tensor, where: Tensor) -> Tensor:
    return t.masked_fill(~where, float("-inf")).exp()


def _chunked(t: Tensor) -> Tensor:
    """(b, l, …) as (b, c, t, …), with zeros at the end."""
    steps = _steps(t.shape[1])
    missing = -t.shape[1] % steps
    filled = torch.cat([t, t.new_zeros((t.shape[0], missing, *t.shape[2:]))], 1)
    chunks: Tensor = filled.unflatten(1, (filled.shape[1] // steps, steps))
    return chunks


def _steps(length: int) -> int:
    """How many steps a chunk has; a symbolic length has chunks of the usual number."""
    return min(length, CHUNK) if isinstance(length, int) and length > 0 else CHUNK


def _joined(t: Tensor, length: int) -> Tensor:
    return t.flatten(1, 2)[:, :length]


def _contiguous(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format)
