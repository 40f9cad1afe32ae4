"""Stands in for the extension of 2DMamba, `v2dmamba_scan` or the `pscan` inside it.

Zhang et al., "2DMamba: Efficient State Space Model for Image Representation with Applications on
Giga-Pixel Whole Slide Image Classification", 2025: a scan along rows, whose states are scanned
along columns by the same decays. Each way is an op, the scan of a state space duality whose heads
are numbers.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.exporter.shims._dtypes import wide
from fuseport.exporter.shims._gradients import of_gated
from fuseport.ops.ssd_chunk_scan import ssd_discrete

__all__ = ["bwd", "fwd"]

_SIDE = 32  # the kernels scan squares of so many rows and columns, and save states at their ends
_SOFTPLUS_THRESHOLD = 20.0


def fwd(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D_: Tensor | None,
    z_: Tensor | None,
    delta_bias_: Tensor | None,
    delta_softplus: bool,
    height: int,
    width: int,
    out_float: bool = True,
) -> list[Tensor]:
    """`[out, x]`, and `out_z` where z is given: `out` before the gate, `out_z` after it.

    r[y, x] = exp(δ̂ A)·r[y, x-1] + δ̂ u B, h[y, x] = exp(δ̂ A)·h[y-1, x] + r[y, x], and
    out = Σ_N C h + D u, gated by SiLU(z), δ̂ = softplus(delta + delta_bias) as of Mamba's scan.

    Args:
        u: (b, d, height·width), row by row.
        delta: like u.
        A: (d, N), real.
        B: (b, G, N, height·width); channel i takes group i // (d/G).
        C: like B.
        D_: (d,), or None.
        z_: like u, or None.
        delta_bias_: (d,), or None.
        delta_softplus: whether delta + delta_bias passes through softplus.
        height: of the image.
        width: of the image.
        out_float: out in float32, whatever u's dtype.

    Raises:
        ValueError: B or C is not 4-D, A is complex, or an image of that height and width is not u.
    """
    if A.is_complex() or B.dim() != 4 or C.dim() != 4:
        raise ValueError(
            "v2dmamba_scan takes a real A and B, C of (b, G, N, l) here; "
            f"got A {A.dtype}, B {tuple(B.shape)}, C {tuple(C.shape)}"
        )
    if height * width != u.shape[2]:
        raise ValueError(f"v2dmamba_scan: {height} × {width} is not the length {u.shape[2]} of u")
    real = wide(u)
    decay, given = _terms(u, delta, A, B, delta_bias_, delta_softplus)
    decay, given = (t.unflatten(3, (height, width)) for t in (decay, given))
    rows = _scanned(given, decay)
    states = _scanned(rows.mT, decay.mT).mT
    out = (states.flatten(3) * _of_channels(C.to(real), u)).sum(2)
    if D_ is not None:
        out = out + D_.to(real)[:, None] * u
    dtype = real if out_float else u.dtype
    result = [out.to(dtype), _saved(rows, states, decay)]
    return result if z_ is None else [*result, (out * F.silu(z_.to(real))).to(dtype)]


def bwd(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D_: Tensor | None,
    z_: Tensor | None,
    delta_bias_: Tensor | None,
    dout: Tensor,
    x_: Tensor | None,
    out_: Tensor | None,
    dz_: Tensor | None,
    delta_softplus: bool,
    recompute_out_z: bool,
    height: int,
    width: int,
) -> list[Any]:
    """`[du, ddelta, dA, dB, dC, dD, ddelta_bias]`, then `dz` with z, then `out_z` if wanted.

    `dout` is the cotangent of what the forward gives: of `out_z` where z is given. `x_` and `out_`,
    which the extension goes on from, are not needed; `dz_` is written to if it is given.
    """
    out_float = dout.dtype == wide(u)

    def again(*inputs: Any) -> Tensor:
        given: tuple[Any, ...] = (*inputs, delta_softplus, height, width, out_float)
        out, _, *gated = fwd(*given)
        return gated[0] if gated else out

    inputs = (u, delta, A, B, C, D_, z_, delta_bias_)
    return of_gated(again, inputs, dout, dz_, again=recompute_out_z)


def _terms(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    delta_bias: Tensor | None,
    delta_softplus: bool,
) -> tuple[Tensor, Tensor]:
    """The decays' logarithms, δ̂ A, and what joins the states, δ̂ u B, (b, d, N, l)."""
    real = wide(u)
    step = delta.to(real)
    if delta_bias is not None:
        step = step + delta_bias.to(real)[:, None]
    if delta_softplus:
        step = F.softplus(step, threshold=_SOFTPLUS_THRESHOLD)
    given = (step * u).unsqueeze(2) * _of_channels(B.to(real), u)
    return step.unsqueeze(2) * A.to(real).unsqueeze(2), given


def _of_channels(t: Tensor, u: Tensor) -> Tensor:
    """What groups have, (b, G, N, l), for each channel of u: (b, d, N, l)."""
    return t.repeat_interleave(u.shape[1] // t.shape[1], 1)


def _scanned(x: Tensor, decay: Tensor) -> Tensor:
    """h_t = exp(decay_t)·h_{t-1} + x_t along the last of the dimensions (b, d, N, m, l)."""
    heads = (0, 3, 4, 1, 2)
    lines, logarithms = (t.permute(heads).flatten(0, 1).flatten(2) for t in (x, decay))
    one = torch.ones((*lines.shape[:2], 1, 1), dtype=x.dtype, device=x.device)
    out, _ = ssd_discrete(lines.unsqueeze(3), logarithms, one, one)
    b, d, states, across, length = x.shape
    return out.view(b, across, length, d, states).permute(0, 3, 4, 1, 2)


def _saved(rows: Tensor, states: Tensor, decay: Tensor) -> Tensor:
    """What `fwd` returns as `x`: (b, d, ⌈height/32⌉, ⌈width/32⌉, N, 2, 32, 2).

    For each square of 32 rows and columns, pairs of the product of all exp(δ̂ A) so far and the
    state: after each of its rows, and after each of its columns; (1, 0) beside the image.

    Args:
        rows: (b, d, N, height, width), the states of the scan along rows.
        states: those of the scan of these along columns.
        decay: the decays' logarithms.
    """
    after_rows = _at_ends(rows, decay).permute(0, 1, 3, 5, 2, 4, 6)
    after_columns = _at_ends(states.mT, decay.mT).permute(0, 1, 5, 3, 2, 4, 6)
    return torch.stack([after_rows, after_columns], 5)


def _at_ends(states: Tensor, decay: Tensor) -> Tensor:
    """Pairs after each 32 steps along the last dimension: (b, d, N, ⌈m/32⌉, 32, ⌈l/32⌉, 2)."""
    lines, length = states.shape[3:]
    device = states.device
    ends = (torch.arange((length + _SIDE - 1) // _SIDE, device=device) + 1) * _SIDE
    at = ends.clamp(max=length) - 1
    line = torch.arange((lines + _SIDE - 1) // _SIDE * _SIDE, device=device)
    inside = (line < lines)[:, None]
    each = [
        torch.where(inside, t.index_select(4, at).index_select(3, line.clamp(max=lines - 1)), fill)
        for t, fill in ((decay.cumsum(4).exp(), 1.0), (states, 0.0))
    ]
    pairs: Tensor = torch.stack(each, -1).unflatten(3, (-1, _SIDE))
    return pairs
