"""The causal depthwise convolution over time in front of a scan, with an optional SiLU.

Signature and semantics follow the extension that models in the wild call (github.com/Dao-AILab/
causal-conv1d, `causal_conv1d_fn`), so that those models work unchanged.
"""

from typing import Literal, overload

import torch
from torch import Tensor

from fuseport.ops import registration
from fuseport.ops.causal_conv1d import reference, shapes
from fuseport.ops.causal_conv1d.cases import BENCH, BUGS, CASES
from fuseport.ops.checks import require
from fuseport.ops.evidence import Evidence
from fuseport.ops.spec import Operator, OpSpec

__all__ = ["SPEC", "causal_conv1d"]


@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = ...,
    seq_idx: Tensor | None = ...,
    initial_states: Tensor | None = ...,
    return_final_states: Literal[False] = ...,
    activation: str | None = ...,
) -> Tensor: ...
@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = ...,
    seq_idx: Tensor | None = ...,
    initial_states: Tensor | None = ...,
    *,
    return_final_states: Literal[True],
    activation: str | None = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = ...,
    seq_idx: Tensor | None = ...,
    initial_states: Tensor | None = ...,
    return_final_states: bool = ...,
    activation: str | None = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    activation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Convolves each channel of `x` over time; b batch, d channels, l length, W filter width.

    out_t = f(bias + Σ_k weight_k x_{t-(W-1)+k}), where x before its first step is
    `initial_states`, or zero, and f is SiLU or nothing.

    Args:
        x: (b, d, l), float16, bfloat16, float32 or float64, in any memory layout.
        weight: (d, W) for any W ≥ 1, in x's dtype, or float32 where x is of a half type.
        bias: (d,), weight's dtype, or None.
        seq_idx: (b, l), int32, or None. Sequences are packed along time: at step t, only taps at
            steps whose seq_idx is that of t count. Where it is negative is padding, whose output is
            0, and which has no part in any gradient.
        initial_states: (b, d, W-1), x's dtype: the inputs before the first. Not with seq_idx.
        return_final_states: whether the last W-1 inputs are returned too, those of
            `initial_states` where x is shorter. With seq_idx, those that are not of the last
            step's sequence are 0.
        activation: None, "silu" or "swish"; the latter two are the same.

    Returns:
        out, (b, d, l), in x's dtype, and in the layout like x's that `fuseport.ops.layout` states;
        with `return_final_states` the pair of out and the final states, (b, d, W-1), in x's
        dtype. Both are differentiable, once, in x, weight, bias and initial_states.

    Raises:
        ValueError: a shape, dtype or device does not fit; the message names the argument.
    """
    registration.ensure(SPEC)
    op = "causal_conv1d"
    known = activation in (None, "silu", "swish")
    require(known, op, "activation", "None, 'silu' or 'swish'", repr(activation))
    silu = activation is not None
    if bias is None:
        bias = torch.zeros(weight.shape[:1], dtype=weight.dtype, device=weight.device)
    operators = torch.ops.fuseport
    if seq_idx is not None:
        got = None if initial_states is None else tuple(initial_states.shape)
        require(got is None, op, "initial_states", "None where seq_idx is given", got)
        out, final_states = operators.causal_conv1d_packed(x, weight, bias, seq_idx, silu)
    else:
        if initial_states is None:
            initial_states = x.new_zeros((*x.shape[:2], max(0, weight.shape[-1] - 1)))
        out, final_states = operators.causal_conv1d(x, weight, bias, initial_states, silu)
    return (out, final_states) if return_final_states else out


_FORWARD = "-> (Tensor out, Tensor final_states)"

SPEC = OpSpec(
    name="causal_conv1d",
    package=__name__,
    function=causal_conv1d,
    operators=(
        Operator(
            name="causal_conv1d",
            schema="(Tensor x, Tensor weight, Tensor bias, Tensor initial_states, bool silu) "
            + _FORWARD,
            reference=reference.causal_conv1d,
            fake=shapes.fake_conv,
            backward="causal_conv1d_backward",
        ),
        Operator(
            name="causal_conv1d_packed",
            schema="(Tensor x, Tensor weight, Tensor bias, Tensor seq_idx, bool silu) " + _FORWARD,
            reference=reference.causal_conv1d_packed,
            fake=shapes.fake_packed,
            backward="causal_conv1d_packed_backward",
        ),
        Operator(
            name="causal_conv1d_backward",
            schema="(Tensor dout, Tensor dfinal_states, Tensor x, Tensor weight, Tensor bias, "
            "Tensor initial_states, bool silu) "
            "-> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dinitial_states)",
            reference=reference.causal_conv1d_backward,
            fake=shapes.fake_conv_backward,
        ),
        Operator(
            name="causal_conv1d_packed_backward",
            schema="(Tensor dout, Tensor dfinal_states, Tensor x, Tensor weight, Tensor bias, "
            "Tensor seq_idx, bool silu) -> (Tensor dx, Tensor dweight, Tensor dbias)",
            reference=reference.causal_conv1d_packed_backward,
            fake=shapes.fake_packed_backward,
        ),
    ),
    cases=CASES,
    bugs=BUGS,
    stands_for=(
        "causal_conv1d",
        "CausalConv1d",
    ),
    bench=BENCH,
    evidence=(
        Evidence("a Mamba-1 mixer", {"A_log": (None, None), "*conv*.weight": (None, 1, None)}),
        Evidence(
            "a Mamba-2 mixer",
            {"A_log": (None,), "*conv*.weight": (None, 1, None)},
            absent=("q_conv1d.weight",),
        ),
        Evidence(
            "a short convolution of flash-linear-attention or Kimi Linear",
            {"q_conv1d.weight": (None, 1, None)},
        ),
    ),
)
