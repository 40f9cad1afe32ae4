"""Norms, short convolutions, rotary embeddings and activations of fla."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseport.exporter.shims._dtypes import beside, wide
from fuseport.exporter.shims._fla.packed import numbers, refuse_states
from fuseport.exporter.shims._norms import layernorm_fn, rmsnorm_fn
from fuseport.exporter.shims._rotary import apply_rotary
from fuseport.ops.causal_conv1d import causal_conv1d
from fuseport.ops.packed import Packed
from fuseport.ops.rms_norm import rms_norm
from fuseport.ops.rms_norm_gated import rms_norm_gated
from fuseport.ops.rotary_embedding import rotary_embedding
from fuseport.ops.swiglu import swiglu

__all__ = ["FUNCTIONS"]

_Result = Tensor | tuple[Tensor, Tensor]


def norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    num_groups: int = 1,
) -> _Result:
    """The norm of x + residual, and with `prenorm` that sum too.

    Args:
        x: (…, d).
        weight: (d,), or None.
        bias: (d,), or None.
        residual: like x, in any floating dtype, which the sum has, or None.
        eps: under the root.
        prenorm: whether the sum is returned, beside the norm.
        residual_in_fp32: the sum without a residual is in float32.
        is_rms_norm: without the mean.
        num_groups: how many groups of channels have a mean of their own each.
    """
    total, kept = _summed(x, residual, residual_in_fp32)
    out = _normal(total, weight, bias, eps, num_groups, is_rms_norm).to(x.dtype)
    return (out, kept) if prenorm else out


def rms(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> _Result:
    """`norm` without the mean."""
    return norm(x, weight, bias, residual, eps, prenorm, residual_in_fp32, True)


def norm_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    num_groups: int = 1,
) -> _Result:
    """A linear layer after `norm`."""
    form = (eps, True, residual_in_fp32, is_rms_norm, num_groups)
    out, kept = norm(x, norm_weight, norm_bias, residual, *form)
    out = F.linear(out.to(linear_weight.dtype), linear_weight, linear_bias)
    return (out, kept) if prenorm else out


def rms_linear(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    eps: float = 1e-5,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
) -> _Result:
    """`norm_linear` without the mean."""
    weights = (norm_weight, norm_bias, linear_weight, linear_bias)
    return norm_linear(x, *weights, residual, eps, prenorm, residual_in_fp32, True)


def gated(
    x: Tensor,
    g: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
    *,
    is_rms_norm: bool,
) -> _Result:
    """`norm` times SiLU(g), or sigmoid(g) for the activation "sigmoid"."""
    total, kept = _summed(x, residual, residual_in_fp32)
    if is_rms_norm and bias is None and activation != "sigmoid":
        z, scale = g.to(total.dtype), _weight(weight, total)
        out = rms_norm_gated(total, z, scale, eps).to(x.dtype)
    else:
        value = g.to(wide(g))
        factor = value.sigmoid() if activation == "sigmoid" else F.silu(value)
        out = (_normal(total.to(value.dtype), weight, bias, eps, 1, is_rms_norm) * factor).to(
            x.dtype
        )
    return (out, kept) if prenorm else out


def gated_linear(
    x: Tensor,
    g: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
    *,
    is_rms_norm: bool,
) -> _Result:
    """A linear layer after `gated`."""
    form = ("swish", residual, True, residual_in_fp32, eps)
    out, kept = gated(x, g, norm_weight, norm_bias, *form, is_rms_norm=is_rms_norm)
    out = F.linear(out.to(linear_weight.dtype), linear_weight, linear_bias)
    return (out, kept) if prenorm else out


def _summed(x: Tensor, residual: Tensor | None, in_float32: bool) -> tuple[Tensor, Tensor]:
    """x + residual as it is normed, and as it is returned."""
    if residual is None:
        return x, x.to(wide(x)) if in_float32 else x
    dtype = wide(x, residual)
    total = x.to(dtype) + residual.to(dtype)
    return total, total.to(residual.dtype)


def _normal(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    groups: int,
    is_rms_norm: bool,
) -> Tensor:
    size = x.shape[-1] // groups
    if is_rms_norm and bias is None:
        return rms_norm(x, _weight(weight, x), eps, size)
    value = x.to(wide(x))
    if is_rms_norm:
        value = rms_norm(value, _weight(None, value), eps, size)
    else:
        value = F.layer_norm(value.unflatten(-1, (groups, size)), (size,), eps=eps).flatten(-2)
    value = value if weight is None else value * weight.to(value.dtype)
    return value if bias is None else value + bias.to(value.dtype)


def _weight(weight: Tensor | None, x: Tensor) -> Tensor:
    """The weight beside x; ones for none."""
    if weight is None:
        return torch.ones(x.shape[-1], dtype=x.dtype, device=x.device)
    return beside(weight, x)


def l2norm(x: Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> Tensor:
    """x / √(Σ x² + eps) over the last dimension."""
    value = x.to(wide(x))
    normal = value * torch.rsqrt((value * value).sum(-1, keepdim=True) + eps)
    return normal.to(output_dtype or x.dtype)


def convolution(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool | None = False,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """A causal convolution of each channel, and the last W inputs.

    Args:
        x: (b, l, d).
        weight: (d, W).
        bias: (d,), or None.
        residual: (b, l, d), added at the end, or None.
        initial_state: (b, d, W), the inputs before the first, of which the oldest has no part.
        output_final_state: whether the last W inputs are returned, (b, d, W), or None.
        activation: "silu", "swish" or None.
        cu_seqlens: (n + 1,), where packed sequences begin, and the end: without states.
    """
    if weight is None:
        raise NotImplementedError("without a weight")
    sequences = None
    if cu_seqlens is not None:
        refuse_states(initial_state, output_final_state)
        sequences = numbers(cu_seqlens, x.shape[1])
    inputs, width = x.transpose(1, 2), weight.shape[1]
    before = None if initial_state is None else initial_state[..., 1:].to(x.dtype)
    taps = beside(weight, x)
    offset = None if bias is None else bias.to(taps.dtype)
    out = causal_conv1d(inputs, taps, offset, sequences, before, activation=activation)
    out = out.transpose(1, 2)
    if residual is not None:
        out = out + residual
    if not output_final_state:
        return out, None
    if initial_state is None:
        every = F.pad(inputs, (width, 0))
    else:
        every = torch.cat([initial_state.to(x.dtype), inputs], 2)
    return out, every[..., -width:].contiguous()


def convolution_step(
    x: Tensor,
    cache: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The same for one step of each sequence, whose inputs in the cache, (b, d, W), are updated.

    Args:
        x: (b, d), (b, 1, d) or (1, b, d).
    """
    steps = x.reshape(cache.shape[0], 1, x.shape[-1])
    out, state = convolution(steps, weight, bias, None, cache, True, activation)
    assert state is not None
    cache.copy_(state)
    out = out.reshape(x.shape)
    return out if residual is None else out + residual, cache


def rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
) -> Tensor:
    """Rotary embeddings of x, (b, l, H, D), by tables, (rows, r), from a row on that is said."""
    return apply_rotary(x, cos, sin, seqlen_offsets, interleaved=interleaved)


def rotary_module(
    self: Any, q: Tensor, k: Tensor, seqlen_offset: int | Tensor = 0, max_seqlen: int | None = None
) -> tuple[Tensor, Tensor]:
    """The module's, of q and k, with tables of just their length: none is kept, which would be of
    the length that came first."""
    if self.scale is not None:
        raise NotImplementedError("with a scale_base (XPos)")
    steps = torch.arange(q.shape[1], dtype=torch.float32, device=q.device)
    if isinstance(seqlen_offset, Tensor):
        steps = seqlen_offset[:, None] + steps
    else:
        steps = seqlen_offset + steps
    steps = steps.to(wide(q))
    angles = steps.unsqueeze(-1) * self.inv_freq.to(steps.dtype)
    cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
    turned = [
        rotary_embedding(t.transpose(1, 2), cos, sin, self.interleaved).transpose(1, 2)
        for t in (q, k)
    ]
    return turned[0], turned[1]


def _rounded(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function of x that is computed in float32 at least."""

    def rounded(x: Tensor) -> Tensor:
        return function(x.to(wide(x))).to(x.dtype)

    return rounded


def logsigmoid(x: Tensor, temperature: float = 1.0) -> Tensor:
    """log sigmoid(x) / temperature."""
    return _rounded(lambda value: F.logsigmoid(value) / temperature)(x)


def bias_gelu(input: Tensor, bias: Tensor) -> Tensor:
    """GELU, by tanh, of input + bias."""
    return F.gelu(input + bias, approximate="tanh")


def multiplied(x: Tensor, y: Tensor) -> Tensor:
    """SiLU(x)·y."""
    return swiglu(x, y)


def multiplied_linear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer after SiLU(x)·y."""
    return F.linear(swiglu(x, y).to(weight.dtype), weight, bias)


def sigmoid_multiplied(x: Tensor, y: Tensor) -> Tensor:
    """sigmoid(x)·y."""
    return _rounded(torch.sigmoid)(x) * y


def shifted(
    x: Tensor,
    cu_seqlens: Tensor | None = None,
    cache: Tensor | None = None,
    output_cache: bool = False,
) -> Any:
    """x_{t-1} - x_t, (b, l, d), and the last step, (b, d), if it is asked for.

    Before the first step it is `cache`, (b, d), or 0. With `cu_seqlens`, (n + 1,), where packed
    sequences begin, and the end, b is 1, and the last steps are n; it is without a cache then.
    """
    if cu_seqlens is not None:
        refuse_states(cache, False)
        begins = Packed.of(cu_seqlens, x.shape[1]).begins()
        before = F.pad(x[:, :-1], (0, 0, 1, 0)).masked_fill(begins[:, None], 0.0)
        last = x[0].index_select(0, cu_seqlens[1:].long() - 1)
        return (before - x, last) if output_cache else before - x
    first = torch.zeros_like(x[:, :1]) if cache is None else cache.reshape(x.shape[0], 1, -1)
    out = torch.cat([first, x[:, :-1]], 1) - x
    return (out, x[:, -1]) if output_cache else out


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "layer_norm": norm,
    "group_norm": norm,
    "rms_norm": rms,
    "layer_norm_linear": norm_linear,
    "group_norm_linear": norm_linear,
    "rms_norm_linear": rms_linear,
    "layer_norm_gated": partial(gated, is_rms_norm=False),
    "rms_norm_gated": partial(gated, is_rms_norm=True),
    "layer_norm_swish_gate_linear": partial(gated_linear, is_rms_norm=False),
    "rms_norm_swish_gate_linear": partial(gated_linear, is_rms_norm=True),
    "layernorm_fn": layernorm_fn,
    "rmsnorm_fn": rmsnorm_fn,
    "l2norm": l2norm,
    "l2_norm": l2norm,
    "causal_conv1d": convolution,
    "causal_conv1d_update": convolution_step,
    "rotary_embedding": rotary,
    "RotaryEmbedding.forward": rotary_module,
    "swiglu": multiplied,
    "swiglu_linear": multiplied_linear,
    "sigmoidglu": sigmoid_multiplied,
    "sigmoid": _rounded(torch.sigmoid),
    "swish": _rounded(F.silu),
    "logsigmoid": logsigmoid,
    "elu_p1": _rounded(lambda x: F.elu(x) + 1),
    "sqrelu": _rounded(lambda x: F.relu(x).square()),
    "fast_gelu_impl": _rounded(lambda x: F.gelu(x, approximate="tanh")),
    "bias_gelu_impl": bias_gelu,
    "token_shift": shifted,
}
