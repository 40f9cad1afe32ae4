"""One step of decoding by Mamba-3's scan, of queries and keys that are turned already."""

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["mamba3_step_fn"]


def mamba3_step_fn(
    state: Tensor,
    Bstate: Tensor,
    Xstate: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    x: Tensor,
    dt: Tensor,
    trap: Tensor,
    xproj: Tensor,
    outproj: Tensor | None = None,
    state_out: Tensor | None = None,
    out: Tensor | None = None,
    z: Tensor | None = None,
    zproj: Tensor | None = None,
    tile_D: int = 64,
    num_warps: int = 2,
) -> None:
    """Writes one step's result to `out`, and the state after it to `state_out`, or to `state`.

    b batch, H heads of width P, N states, R ranks; computed in float32 at least.

    Args:
        state: (b, H, P, N).
        Bstate: (b, R, H, N), of the step before.
        Xstate: (b, H, P), of the step before.
        A: (b, H): the decay is exp(A·dt).
        B: (b, R, H, N).
        C: like B.
        D: (H,), the skip.
        x: (b, H, P).
        dt: (b, H).
        trap: (b, H), in [0, 1]: the share of this step's input; the rest is of that before.
        xproj: (R, H, P), which x is multiplied by for each rank.
        outproj: (R, H, P): ranks are summed with these weights; None to keep them.
        state_out: like state, or None.
        out: (b, H, P), or (b, R, H, P) without outproj.
        z: (b, H, P), a gate by SiLU, or None.
        zproj: (R, H, P), which z is multiplied by for each rank.
        tile_D: has no effect.
        num_warps: has no effect.

    Raises:
        ValueError: there is no `out`, or no `zproj` beside a z.
    """
    del tile_D, num_warps
    if out is None:
        raise ValueError("mamba3_step_fn: out must be given")
    wide = torch.promote_types(state.dtype, torch.float32)
    step, share, up = dt.to(wide), trap.to(wide), xproj.to(wide)
    decay = torch.exp(A.to(wide) * step)
    now = x.to(wide).unsqueeze(1) * up
    then = Xstate.to(wide).unsqueeze(1) * up
    inputs = torch.einsum("brhp,brhn->bhpn", now * (share * step)[:, None, :, None], B.to(wide))
    weight = (decay * (1 - share) * step)[:, None, :, None]
    inputs = inputs + torch.einsum("brhp,brhn->bhpn", then * weight, Bstate.to(wide))
    new = state.to(wide) * decay[..., None, None] + inputs
    y = torch.einsum("bhpn,brhn->brhp", new, C.to(wide)) + now * D.to(wide)[:, None]
    if z is not None:
        if zproj is None:
            raise ValueError("mamba3_step_fn: zproj must be given where z is")
        y = y * F.silu(z.to(wide).unsqueeze(1) * zproj.to(wide))
    if outproj is not None:
        y = (y * outproj.to(wide)).sum(1)
    (state if state_out is None else state_out).copy_(new)
    out.copy_(y)
