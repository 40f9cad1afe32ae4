"""The selective scan in plain torch, forward and backward: what the kernels are held against.

Any device, and any dtype that the op takes; in float64 it is the truth of a verification. The
recurrence runs step by step, everything else chunk by chunk, with time as the first dimension.

Forward is differentiable by autograd and does nothing in place. Backward is stated explicitly,
because autograd cannot be called inside a registered operator. With a_t = exp(δ̂_t A) and h_t as in
the public docstring, and with g_t the cotangent of h_t:

    g_t = C_t dy_t + a_{t+1} g_{t+1}, where g after the last step is dlast_state
    dC_t = dy_t h_t        dB_t = g_t δ̂_t u_t        dA = Σ_t g_t h_{t-1} a_t δ̂_t
    du_t = δ̂_t Σ_N g_t B_t + D dy_t
    dδ̂_t = u_t Σ_N g_t B_t + Σ_N g_t h_{t-1} a_t A

For complex A, y_t = 2·Re(Σ_N C_t h_t) has 2·dy_t take the place of dy_t beside C and h. Cotangents
of complex numbers are torch's, ∂L/∂Re + i·∂L/∂Im; g_t, then, is the conjugate of that of h_t, and
dA, dB and dC are the conjugates of what stands here, du and dδ̂ the real parts.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.ops.layout import contiguous_as
from fuseport.ops.selective_scan.shapes import CHUNK, check, check_backward

__all__ = [
    "selective_scan",
    "selective_scan_backward",
    "selective_scan_gated",
    "selective_scan_gated_backward",
]

SOFTPLUS_THRESHOLD = 20.0  # above it softplus is the identity, in torch as in the extension


def selective_scan(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    delta_bias: Tensor,
    delta_softplus: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """out, last_state and chunk_states, (b, ⌈l/64⌉ + 1, N, d): at the borders of chunks."""
    check("selective_scan", u, delta, A, B, C, D, None, delta_bias)
    return _forward(u, delta, A, B, C, D, None, delta_bias, delta_softplus)


def selective_scan_gated(
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
    """The same, with out multiplied by SiLU(z)."""
    check("selective_scan_gated", u, delta, A, B, C, D, z, delta_bias)
    return _forward(u, delta, A, B, C, D, z, delta_bias, delta_softplus)


def selective_scan_backward(
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
    """(du, ddelta, dA, dB, dC, dD, ddelta_bias), each in the shape and dtype of its input."""
    check("selective_scan_backward", u, delta, A, B, C, D, None, delta_bias)
    check_backward("selective_scan_backward", dout, dlast_state, u, A, chunk_states)
    inputs = (u, delta, A, B, C, D, None, delta_bias, chunk_states, delta_softplus)
    return _backward(dout, dlast_state, *inputs)


def selective_scan_gated_backward(
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
    """(du, ddelta, dA, dB, dC, dD, dz, ddelta_bias), each in the shape and dtype of its input."""
    check("selective_scan_gated_backward", u, delta, A, B, C, D, z, delta_bias)
    check_backward("selective_scan_gated_backward", dout, dlast_state, u, A, chunk_states)
    inputs = (u, delta, A, B, C, D, z, delta_bias, chunk_states, delta_softplus)
    return _backward(dout, dlast_state, *inputs)


def _forward(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor | None,
    delta_bias: Tensor,
    delta_softplus: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    b, d, l = u.shape  # noqa: E741
    real = D.dtype
    x = _time_first(u, real)
    step = _step(_time_first(delta, real) + delta_bias, delta_softplus)
    state = torch.zeros((b, *A.shape), dtype=A.dtype, device=A.device)
    saved, ys = [], [x[:0]]  # the empty y makes a scan of no steps work
    for start in range(0, l, CHUNK):
        saved.append(state.detach())
        chunk = slice(start, min(start + CHUNK, l))
        decay, drive = _coefficients(step[chunk], x[chunk], A, _at(B, chunk, d, A.dtype))
        states = _states(decay, drive, state)
        state = states[-1]
        ys.append(_read(torch.stack(states[1:]), _at(C, chunk, d, A.dtype)))
    y = torch.cat(ys) + D * x
    out = y if z is None else y * F.silu(_time_first(z, real))
    chunk_states = _contiguous(torch.stack([*saved, state.detach()], 1).mT)
    return contiguous_as(out.permute(1, 2, 0).to(u.dtype), u), _contiguous(state), chunk_states


def _backward(
    dout: Tensor,
    dlast_state: Tensor,
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor | None,
    delta_bias: Tensor,
    chunk_states: Tensor,
    delta_softplus: bool,
) -> tuple[Tensor, ...]:
    d, l = u.shape[1:]  # noqa: E741
    real = D.dtype
    x = _time_first(u, real)
    raw_step = _time_first(delta, real) + delta_bias
    step = _step(raw_step, delta_softplus)
    dout_ = dy = _time_first(dout, real)
    if z is not None:
        gate = _time_first(z, real)
        dy = dout_ * F.silu(gate)
    dread = 2 * dy if A.is_complex() else dy

    g = dlast_state.conj_physical()
    dA = torch.zeros(A.shape, dtype=A.dtype, device=A.device)
    parts: dict[str, list[Tensor]] = {"y": [], "dx": [], "dstep": [], "dB": [], "dC": []}
    for index in reversed(range(chunk_states.shape[1] - 1)):
        chunk = slice(index * CHUNK, min(index * CHUNK + CHUNK, l))
        B_, C_ = _at(B, chunk, d, A.dtype), _at(C, chunk, d, A.dtype)
        decay, drive = _coefficients(step[chunk], x[chunk], A, B_)
        states = _states(decay, drive, chunk_states[:, index].mT)
        before, after = torch.stack(states[:-1]), torch.stack(states[1:])

        adjoints = []
        inflow = _scaled(dread[chunk, ..., None], C_)
        for now, following in zip(inflow.flip(0), decay.flip(0), strict=True):
            adjoints.append(g + now)
            g = following * adjoints[-1]
        dstate = torch.stack(adjoints).flip(0)

        ddrive = _real((dstate * B_).sum(-1))
        dexponent = dstate * before * decay
        dA = dA + _scaled(step[chunk, ..., None], dexponent).sum((0, 1))
        parts["y"].append(_read(after, C_))
        parts["dx"].append(step[chunk] * ddrive)
        parts["dstep"].append(x[chunk] * ddrive + _real((dexponent * A).sum(-1)))
        parts["dB"].append(_reduced(_scaled((step[chunk] * x[chunk])[..., None], dstate), B))
        parts["dC"].append(_reduced(_scaled(dread[chunk, ..., None], after), C))

    y, dx, dstep = (torch.cat([x[:0], *reversed(parts[k])]) for k in ("y", "dx", "dstep"))
    if delta_softplus:
        dstep = torch.where(raw_step > SOFTPLUS_THRESHOLD, dstep, dstep * raw_step.sigmoid())
    dz: tuple[Tensor, ...] = ()
    if z is not None:
        s = gate.sigmoid()
        dgate = dout_ * (y + D * x) * s * (1 + gate * (1 - s))
        dz = (contiguous_as(dgate.permute(1, 2, 0).to(z.dtype), z),)
    return (
        contiguous_as((dx + D * dy).permute(1, 2, 0).to(u.dtype), u),
        contiguous_as(dstep.permute(1, 2, 0).to(delta.dtype), delta),
        _contiguous(dA.conj_physical()),
        _joined(parts["dB"], B),
        _joined(parts["dC"], C),
        (dy * x).sum((0, 1)),
        *dz,
        dstep.sum((0, 1)),
    )


def _contiguous(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format)


def _time_first(t: Tensor, dtype: torch.dtype) -> Tensor:
    # Not a view: what is computed of one would have its strides, and steps that lie apart.
    return _contiguous(t.permute(2, 0, 1).to(dtype))


def _step(raw: Tensor, softplus: bool) -> Tensor:
    return F.softplus(raw, threshold=SOFTPLUS_THRESHOLD) if softplus else raw


def _at(coefficient: Tensor, chunk: slice, d: int, dtype: torch.dtype) -> Tensor:
    """B or C over the steps of a chunk, as (t, b, d, N), or what broadcasts to it."""
    if coefficient.dim() == 2:
        return coefficient.to(dtype)
    if coefficient.dim() == 3:
        coefficient = coefficient[:, None]
    if dtype.is_complex:
        parts = coefficient[..., 2 * chunk.start : 2 * chunk.stop].to(dtype.to_real())
        values = torch.complex(parts[..., ::2], parts[..., 1::2])
    else:
        values = coefficient[..., chunk].to(dtype)
    steps = _contiguous(values.permute(3, 0, 1, 2))
    groups = steps.shape[2]
    return steps if groups == 1 else steps.repeat_interleave(d // groups, dim=2)


def _reduced(gradient: Tensor, coefficient: Tensor) -> Tensor:
    """A gradient per channel, (t, b, d, N), summed over what B or C is broadcast over."""
    gradient = gradient.conj_physical()
    if coefficient.dim() == 2:
        return gradient.sum((0, 1))
    groups = coefficient.shape[1] if coefficient.dim() == 4 else 1
    t, b, d, N = gradient.shape
    grouped = gradient.reshape(t, b, groups, d // groups, N).sum(3).permute(1, 2, 3, 0)
    if grouped.is_complex():
        grouped = torch.view_as_real(grouped).flatten(-2)
    return grouped if coefficient.dim() == 4 else grouped[:, 0]


def _joined(parts: list[Tensor], coefficient: Tensor) -> Tensor:
    """The gradients of B or C of all chunks, last chunk first, as one."""
    if not parts:
        return torch.zeros(coefficient.shape, dtype=coefficient.dtype, device=coefficient.device)
    constant = coefficient.dim() == 2
    total = torch.stack(parts).sum(0) if constant else torch.cat(parts[::-1], dim=-1)
    return _contiguous(total.to(coefficient.dtype))


def _real(t: Tensor) -> Tensor:
    return t.real if t.is_complex() else t


def _scaled(real: Tensor, t: Tensor) -> Tensor:
    """The product with a real tensor: part by part, where torch would make that complex first."""
    if not t.is_complex():
        return real * t
    return torch.complex(real * t.real, real * t.imag)


def _read(states: Tensor, C: Tensor) -> Tensor:
    """y: the states, (t, b, d, N), seen through C; for complex ones, with their conjugates."""
    y = (states * C).sum(-1)
    return 2 * y.real if y.is_complex() else y


def _coefficients(step: Tensor, x: Tensor, A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """exp(δ̂ A) and δ̂ u B over a chunk, (t, b, d, N)."""
    return torch.exp(_scaled(step[..., None], A)), _scaled((step * x)[..., None], B)


def _states(decay: Tensor, drive: Tensor, state: Tensor) -> list[Tensor]:
    """The state before each step of a chunk, and after the last; each (b, d, N)."""
    states = [state]
    # `unbind`, not an index per step: autograd would fill a whole zero tensor for each of those.
    for a, x in zip(decay.unbind(), drive.unbind(), strict=True):
        states.append(a * states[-1] + x)
    return states
