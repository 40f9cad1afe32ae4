"""A decoding step of the causal convolution in plain torch: what the kernels are held against.

Any device, and any dtype that the op takes; in float64 it is the truth of a verification. Sums are
of float32 at least.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.ops.causal_conv1d_update.shapes import check

__all__ = ["causal_conv1d_update", "causal_conv1d_update_circular"]


def causal_conv1d_update(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor, silu: bool
) -> tuple[Tensor, Tensor]:
    """out, (b, d, l), and the last S of the state's inputs and x."""
    check("causal_conv1d_update", x, conv_state, None, weight, bias)
    inputs = torch.cat([conv_state, x], 2)
    new_state = inputs[:, :, x.shape[2] :].clone(memory_format=torch.contiguous_format)
    window = inputs[:, :, conv_state.shape[2] - (weight.shape[1] - 1) :]
    return _convolved(window, weight, bias, silu), new_state


def causal_conv1d_update_circular(
    x: Tensor, conv_state: Tensor, cache_seqlens: Tensor, weight: Tensor, bias: Tensor, silu: bool
) -> tuple[Tensor, Tensor]:
    """The same, where step n of a sequence is in slot n mod S; cache_seqlens have been before."""
    check("causal_conv1d_update_circular", x, conv_state, cache_seqlens, weight, bias)
    b, d, length = x.shape
    slots, halo = conv_state.shape[2], weight.shape[1] - 1
    first = cache_seqlens.long()[:, None]
    before = (first + torch.arange(-halo, 0, device=x.device)).remainder(slots)
    window = torch.cat([conv_state.gather(2, before[:, None].expand(b, d, halo)), x], 2)
    # Of each slot: the last step that is kept there; a negative one is what it has already.
    slot = torch.arange(slots, device=x.device)
    step = length - 1 - (first + (length - 1) - slot).remainder(slots)
    inputs = torch.cat([conv_state, x], 2)
    source = torch.where(step >= 0, slots + step, slot)
    new_state = inputs.gather(2, source[:, None].expand(b, d, slots))
    return _convolved(window, weight, bias, silu), new_state


def _convolved(window: Tensor, weight: Tensor, bias: Tensor, silu: bool) -> Tensor:
    """The outputs, (b, d, l), of inputs (b, d, W-1 + l)."""
    width = weight.shape[1]
    length = window.shape[2] - (width - 1)
    total = _wide(bias)[:, None].expand(window.shape[0], -1, length)
    for k in range(width):
        total = total + _wide(weight)[:, k, None] * _wide(window[:, :, k : k + length])
    out = F.silu(total) if silu else total
    return out.to(window.dtype).clone(memory_format=torch.contiguous_format)


def _wide(t: Tensor) -> Tensor:
    return t if t.dtype == torch.float64 else t.float()
