"""The causal convolution in plain torch, forward and backward: what the kernels are held against.

Any device, and any dtype that the op takes; in float64 it is the truth of a verification. Sums are
of float32 at least. Forward is differentiable by autograd; backward is stated explicitly, because
autograd cannot be called inside a registered operator. With s_t what goes into the activation f,
and x at negative times the initial states:

    s_t = bias + Σ_k weight_k x_{t-(W-1)+k}        out_t = f(s_t)        ds_t = f'(s_t) dout_t
    dweight_k = Σ_{b,t} ds_t x_{t-(W-1)+k}         dbias = Σ_{b,t} ds_t
    dx_t = Σ_k weight_k ds_{t+(W-1)-k}, and the cotangent of the final state that x_t is

Where sequences are packed, terms whose two times are of different sequences are zero, and so are
out and ds at padding.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.ops.causal_conv1d.shapes import check, check_cotangents
from fuseport.ops.layout import contiguous_as

__all__ = [
    "causal_conv1d",
    "causal_conv1d_backward",
    "causal_conv1d_packed",
    "causal_conv1d_packed_backward",
]


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor, initial_states: Tensor, silu: bool
) -> tuple[Tensor, Tensor]:
    """out, and the last W-1 inputs, (b, d, W-1)."""
    check("causal_conv1d", x, weight, bias, initial_states, None)
    return _forward(x, weight, bias, initial_states, None, silu)


def causal_conv1d_packed(
    x: Tensor, weight: Tensor, bias: Tensor, seq_idx: Tensor, silu: bool
) -> tuple[Tensor, Tensor]:
    """The same of packed sequences; the last inputs are those of the last step's sequence."""
    check("causal_conv1d_packed", x, weight, bias, None, seq_idx)
    return _forward(x, weight, bias, _no_states(x, weight), seq_idx, silu)


def causal_conv1d_backward(
    dout: Tensor,
    dfinal_states: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    initial_states: Tensor,
    silu: bool,
) -> tuple[Tensor, ...]:
    """(dx, dweight, dbias, dinitial_states), each in the shape and dtype of its input."""
    check("causal_conv1d_backward", x, weight, bias, initial_states, None)
    check_cotangents("causal_conv1d_backward", dout, dfinal_states, x, weight)
    return _backward(dout, dfinal_states, x, weight, bias, initial_states, None, silu)


def causal_conv1d_packed_backward(
    dout: Tensor,
    dfinal_states: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    seq_idx: Tensor,
    silu: bool,
) -> tuple[Tensor, ...]:
    """(dx, dweight, dbias), each in the shape and dtype of its input."""
    check("causal_conv1d_packed_backward", x, weight, bias, None, seq_idx)
    check_cotangents("causal_conv1d_packed_backward", dout, dfinal_states, x, weight)
    states = _no_states(x, weight)
    return _backward(dout, dfinal_states, x, weight, bias, states, seq_idx, silu)[:3]


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    initial_states: Tensor,
    seq_idx: Tensor | None,
    silu: bool,
) -> tuple[Tensor, Tensor]:
    length, width = x.shape[2], weight.shape[1]
    inputs = torch.cat([initial_states, x], 2)
    total = _activated(_wide(inputs), _wide(weight), _wide(bias), seq_idx)
    out = F.silu(total) if silu else total
    final_states = inputs[:, :, length:]
    if seq_idx is not None:
        out = torch.where(seq_idx[:, None] >= 0, out, 0)
        final_states = torch.where(_in_last(seq_idx, width), final_states, 0)
    return contiguous_as(out.to(x.dtype), x), _contiguous(final_states)


def _backward(
    dout: Tensor,
    dfinal_states: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    initial_states: Tensor,
    seq_idx: Tensor | None,
    silu: bool,
) -> tuple[Tensor, ...]:
    length, width = x.shape[2], weight.shape[1]
    inputs, weights = _wide(torch.cat([initial_states, x], 2)), _wide(weight)
    ds = _wide(dout)
    if silu:
        total = _activated(inputs, weights, _wide(bias), seq_idx)
        s = total.sigmoid()
        ds = ds * s * (1 + total * (1 - s))
    dfinal = _wide(dfinal_states)
    if seq_idx is not None:
        ds = torch.where(seq_idx[:, None] >= 0, ds, 0)
        dfinal = torch.where(_in_last(seq_idx, width), dfinal, 0)
    dinputs = F.pad(dfinal, (length, 0))
    dweights = []
    for k in range(width):
        lag = width - 1 - k
        dweights.append(_masked(ds * inputs[:, :, k : k + length], lag, seq_idx).sum((0, 2)))
        given = _masked(weights[:, k, None] * ds, lag, seq_idx)
        dinputs = dinputs + F.pad(given, (k, lag))
    dinitial, dx = dinputs[:, :, : width - 1], dinputs[:, :, width - 1 :]
    return (
        contiguous_as(dx.to(x.dtype), x),
        torch.stack(dweights, 1).to(weight.dtype),
        ds.sum((0, 2)).to(bias.dtype),
        _contiguous(dinitial.to(x.dtype)),
    )


def _activated(inputs: Tensor, weight: Tensor, bias: Tensor, seq_idx: Tensor | None) -> Tensor:
    """What goes into the activation, (b, d, l), from inputs (b, d, W-1 + l)."""
    width = weight.shape[1]
    length = inputs.shape[2] - (width - 1)
    total = bias[:, None].expand(inputs.shape[0], -1, length)
    for k in range(width):
        product = weight[:, k, None] * inputs[:, :, k : k + length]
        total = total + _masked(product, width - 1 - k, seq_idx)
    return total


def _masked(values: Tensor, lag: int, seq_idx: Tensor | None) -> Tensor:
    """values where a step and the one `lag` steps before it are of one sequence, else zeros."""
    if seq_idx is None:
        return values
    before = F.pad(seq_idx, (lag, 0), value=-1)[:, : seq_idx.shape[1]]
    return torch.where(((before == seq_idx) & (seq_idx >= 0))[:, None], values, 0)


def _in_last(seq_idx: Tensor, width: int) -> Tensor:
    """Whether the last W-1 steps are of the last one's sequence, (b, 1, W-1)."""
    if seq_idx.shape[1] == 0:
        return seq_idx.new_zeros((seq_idx.shape[0], 1, width - 1), dtype=torch.bool)
    last = seq_idx[:, -1:]
    steps = F.pad(seq_idx, (width - 1, 0), value=-1)[:, seq_idx.shape[1] :]
    return ((steps == last) & (last >= 0))[:, None]


def _no_states(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_zeros((x.shape[0], x.shape[1], weight.shape[1] - 1))


def _wide(t: Tensor) -> Tensor:
    return t if t.dtype == torch.float64 else t.float()


def _contiguous(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format)
